"""`replay`: a stream of requests and frees through the simulated allocator, with the peaks of each phase.

`bounds` replays it under several placements, since the real one is never known for certain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast, get_args

from vramfit.allocator.caching import CachingAllocator, SimulatedOutOfMemory
from vramfit.allocator.options import AllocatorOptions, CapacityKind
from vramfit.allocator.placement import (
    DRIVER_EVENTS,
    AlternatingPlacement,
    AscendingPlacement,
    DescendingPlacement,
    DriverEvent,
    FreshPlacement,
    Placement,
    ShuffledPlacement,
    UsedProcessPlacement,
)
from vramfit.allocator.pool import Block

MarkKind = Literal["phase", "driver", "empty_cache"]
UNNAMED_PHASE = ""
"""The phase of events before the first phase mark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Something that happens just before the event at `index`."""

    index: int
    kind: MarkKind
    name: str = ""
    """The phase that begins (no name twice), or the `DriverEvent`."""

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ValueError(f"a mark cannot come before event {self.index}")
        if self.kind not in get_args(MarkKind):
            raise ValueError(f"{self.kind!r} is not a kind of mark: {', '.join(get_args(MarkKind))}")
        if self.kind == "driver" and self.name not in DRIVER_EVENTS:
            raise ValueError(f"{self.name!r} is not a driver event: {', '.join(DRIVER_EVENTS)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePeaks:
    """The figures of one phase; peaks start at what is held when it begins, as after a reset of the stats."""

    name: str
    begin: int
    """Index of the phase's first event."""
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    cumulative_reserved_bytes: int
    """The most reserved up to the end of this phase, in any phase."""
    allocated_peak_index: int
    """The event at which `allocated` first reaches its peak; `begin` if the phase never passes its start."""
    num_retries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemoryEvent:
    """The request that did not fit."""

    index: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """What a stream took, up to its end or to the request that did not fit."""

    phases: tuple[PhasePeaks, ...]
    out_of_memory: OutOfMemoryEvent | None

    @property
    def peak_requested_bytes(self) -> int:
        return max(phase.peak_requested_bytes for phase in self.phases)

    @property
    def peak_allocated_bytes(self) -> int:
        return max(phase.peak_allocated_bytes for phase in self.phases)

    @property
    def peak_reserved_bytes(self) -> int:
        return self.phases[-1].cumulative_reserved_bytes

    @property
    def num_retries(self) -> int:
        return sum(phase.num_retries for phase in self.phases)

    def phase(self, name: str) -> PhasePeaks:
        """The phase of that name; LookupError if the replay has not reached it."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise LookupError(f"no phase {name!r}: {', '.join(repr(phase.name) for phase in self.phases)}")


def replay(
    events: Sequence[int],
    marks: Sequence[Mark] = (),
    *,
    streams: Mapping[int, int] | None = None,
    capacity_bytes: int | None = None,
    options: AllocatorOptions | None = None,
    placement: Placement | None = None,
    capacity_kind: CapacityKind = "allowed",
) -> ReplayResult:
    """Replay a stream and return its peaks.

    Args:
        events: one number an event. A positive one requests that many bytes; requests count from 0, and
            `-k` frees what request `k` got. What is not freed stays.
        marks: phases, driver events and `empty_cache` calls, by index; more than one may share an index.
        streams: request → its CUDA stream, for those that are not made on the default one.
        capacity_bytes, options, placement, capacity_kind: of the `CachingAllocator`.

    Returns:
        The peaks of each phase. A request that does not fit ends the replay: see `out_of_memory`.

    >>> result = replay([1000, 4 * 2**20, 0, -1])
    >>> result.peak_requested_bytes, result.peak_allocated_bytes, result.peak_reserved_bytes
    (4195304, 4195328, 23068672)
    """
    allocator = CachingAllocator(capacity_bytes, options, placement, capacity_kind=capacity_kind)
    phases = _Phases(allocator)
    held: list[Block | None] = []
    position = 0
    for mark in sorted(marks, key=lambda mark: mark.index):
        failure = _run(allocator, events, position, mark.index, held, phases, streams)
        if failure is not None:
            return ReplayResult(phases=phases.close(), out_of_memory=failure)
        position = mark.index
        if mark.kind == "phase":
            phases.begin(mark.name, mark.index)
        elif mark.kind == "driver":
            allocator.placement.on_event(cast(DriverEvent, mark.name))
        else:
            allocator.empty_cache()
    failure = _run(allocator, events, position, len(events), held, phases, streams)
    return ReplayResult(phases=phases.close(), out_of_memory=failure)


def _run(
    allocator: CachingAllocator,
    events: Sequence[int],
    begin: int,
    end: int,
    held: list[Block | None],
    phases: "_Phases",
    streams: Mapping[int, int] | None,
) -> OutOfMemoryEvent | None:
    """Replay events `begin` to `end`; `held` is the block of each request so far."""
    malloc, free = allocator.malloc, allocator.free
    index, size = begin, 0
    peak_bytes = allocator.peak_allocated_bytes
    try:
        for index, size in enumerate(events[begin:end], begin):
            if size > 0:
                held.append(malloc(size, streams.get(len(held), 0)) if streams else malloc(size))
                if allocator.allocated_bytes > peak_bytes:
                    peak_bytes = allocator.allocated_bytes
                    phases.allocated_peak_index = index
            else:
                block = held[-size]
                if block is None:
                    raise ValueError(f"event {index} frees request {-size} for the second time")
                held[-size] = None
                free(block)
    except SimulatedOutOfMemory as error:
        return OutOfMemoryEvent(
            index=index,
            requested_bytes=size,
            allocated_bytes=error.allocated_bytes,
            reserved_bytes=error.reserved_bytes,
        )
    except IndexError:
        if -size < len(held):
            raise
        raise ValueError(f"event {index} frees request {-size}; there were {len(held)}") from None
    return None


class _Phases:
    """Closes one phase and opens the next."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._closed: list[PhasePeaks] = []
        self._open: tuple[str, int] = (UNNAMED_PHASE, 0)
        self._retries_before = 0
        self.allocated_peak_index = 0

    def begin(self, name: str, index: int) -> None:
        if index > 0 or self._open != (UNNAMED_PHASE, 0):
            self.close()
        if any(phase.name == name for phase in self._closed):
            raise ValueError(f"phase {name!r} begins twice")
        self._open = (name, index)
        self.allocated_peak_index = index
        self._retries_before = self._allocator.num_retries
        self._allocator.reset_peaks()

    def close(self) -> tuple[PhasePeaks, ...]:
        name, begin = self._open
        allocator = self._allocator
        cumulative_bytes = self._closed[-1].cumulative_reserved_bytes if self._closed else 0
        self._closed.append(
            PhasePeaks(
                name=name,
                begin=begin,
                peak_requested_bytes=allocator.peak_requested_bytes,
                peak_allocated_bytes=allocator.peak_allocated_bytes,
                peak_reserved_bytes=allocator.peak_reserved_bytes,
                cumulative_reserved_bytes=max(cumulative_bytes, allocator.peak_reserved_bytes),
                allocated_peak_index=self.allocated_peak_index,
                num_retries=allocator.num_retries - self._retries_before,
            )
        )
        return tuple(self._closed)


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
