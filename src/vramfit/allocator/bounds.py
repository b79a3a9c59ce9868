"""`bounds`: what a stream takes under several placements, since the real one is never known for certain."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from vramfit.allocator.options import AllocatorOptions
from vramfit.allocator.placement import (
    AlternatingPlacement,
    AscendingPlacement,
    DescendingPlacement,
    FreshPlacement,
    Placement,
    ShuffledPlacement,
    UsedProcessPlacement,
)
from vramfit.allocator.replay import Mark, ReplayResult, replay
from vramfit.allocator.rules import CapacityKind

MakePlacement = Callable[[], Placement]
PLACEMENTS: tuple[MakePlacement, ...] = (FreshPlacement, UsedProcessPlacement, DescendingPlacement)
"""The most likely one first. Addresses that climb, or lie at random, were not seen on hardware and are left out; with
them, one of 24 largest batches found on an H200 would be predicted two samples lower."""
OTHER_PLACEMENTS: tuple[MakePlacement, ...] = (AscendingPlacement, *(partial(ShuffledPlacement, n) for n in range(2)))
"""They show how much the order of addresses can matter for a stream; whether a job fits is not asked of them."""
LOADING_PLACEMENTS: tuple[MakePlacement, ...] = tuple(partial(AlternatingPlacement, seed) for seed in range(12))
"""For weights that do not stay where they were loaded: in 36 runs of FSDP2 on an H200 no peak was above the highest of
theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementBounds:
    """The same stream under several placements."""

    replays: tuple[ReplayResult, ...]

    @property
    def likely(self) -> ReplayResult:
        """The replay under the placement seen on real hardware."""
        return self.replays[0]

    @property
    def safe_allocated_bytes(self) -> int:
        return max(result.peak_allocated_bytes for result in self.replays)

    @property
    def safe_reserved_bytes(self) -> int:
        return max(result.peak_reserved_bytes for result in self.replays)

    @property
    def fits(self) -> bool:
        """Whether the stream ran to its end under every placement."""
        return all(result.out_of_memory is None for result in self.replays)

    @property
    def num_retries(self) -> int:
        """The most often that cached segments had to be freed to make room, under any placement."""
        return max(result.num_retries for result in self.replays)


def bounds(
    events: Sequence[int],
    marks: Sequence[Mark] = (),
    *,
    streams: Mapping[int, int] | None = None,
    placements: Sequence[MakePlacement] = PLACEMENTS,
    capacity_bytes: int | None = None,
    options: AllocatorOptions | None = None,
    capacity_kind: CapacityKind = "allowed",
) -> PlacementBounds:
    """Replay a stream under each placement, the likeliest first; arguments as of `replay`.

    A placement decides only which of several free blocks of one size is taken. This is the largest outcome
    of those seen on real hardware, no proof for all: on 21 recorded streams it was never below what the GPU
    reported. Where expandable segments are on nothing depends on placement, and one replay says it all.

    >>> bounds([3 * 2**20, 30 * 2**20]).safe_reserved_bytes // 2**20
    50
    """
    expandable = options is not None and options.expandable_segments
    return PlacementBounds(
        replays=tuple(
            replay(
                events,
                marks,
                streams=streams,
                capacity_bytes=capacity_bytes,
                options=options,
                placement=make_placement(),
                capacity_kind=capacity_kind,
            )
            for make_placement in (placements[:1] if expandable else placements)
        )
    )
