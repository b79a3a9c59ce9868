"""`weigh`: a stream against a capacity, over the states a process may be in and the placements seen."""

from dataclasses import dataclass

from vramfit.allocator.bounds import PLACEMENTS, PlacementBounds, bounds
from vramfit.allocator.options import AllocatorOptions
from vramfit.allocator.placement import UsedProcessPlacement
from vramfit.allocator.replay import OutOfMemoryEvent, ReplayResult, replay
from vramfit.estimator.states import marks_of, warm_stream
from vramfit.records.stream import Stream


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stream takes and whether that stays inside the capacity."""

    likely: ReplayResult
    """The replay whose figures are given."""
    stream: Stream
    """The stream of that replay: a cold process's, unless only a warm one fits."""
    replayed_capacity_bytes: int | None
    """The capacity of that replay; None where it ran freely."""
    safe_reserved_bytes: int
    fits: bool | None
    fits_cold: bool | None
    num_retries: int = 0


def weigh(cold: Stream, options: AllocatorOptions, capacity_bytes: int | None) -> Outcome:
    """Replay freely, cold and warm, and inside the capacity where that would be passed."""
    warm = warm_stream(cold)
    free = _bounds(cold, options, None)
    warm_free = replay(
        warm.events,
        marks_of(warm),
        streams=warm.request_streams,
        options=options,
        placement=UsedProcessPlacement(),
    )
    safe_bytes = max(free.safe_reserved_bytes, warm_free.peak_reserved_bytes)
    if capacity_bytes is None:
        return Outcome(free.likely, cold, None, safe_bytes, None, None)
    if safe_bytes <= capacity_bytes:
        return Outcome(free.likely, cold, None, safe_bytes, True, True)
    if free.likely.peak_requested_bytes > capacity_bytes:
        return Outcome(free.likely, cold, None, safe_bytes, False, False)  # not even without any waste
    capped, capped_cold = _bounds(warm, options, capacity_bytes), _bounds(cold, options, capacity_bytes)
    if not capped.fits:
        return Outcome(free.likely, cold, None, safe_bytes, False, capped_cold.fits)
    shown = (capped_cold.likely, cold) if capped_cold.fits else (capped.likely, warm)
    safe_bytes = min(safe_bytes, capacity_bytes)
    return Outcome(*shown, capacity_bytes, safe_bytes, True, capped_cold.fits, capped.num_retries)


def _bounds(stream: Stream, options: AllocatorOptions, capacity_bytes: int | None) -> PlacementBounds:
    return bounds(
        stream.events,
        marks_of(stream),
        streams=stream.request_streams,
        options=options,
        capacity_bytes=capacity_bytes,
    )


def fails(stream: Stream, options: AllocatorOptions, capacity_bytes: int) -> OutOfMemoryEvent | None:
    """The request that does not fit under some placement; None if it runs under all. The likeliest comes first."""
    for make_placement in PLACEMENTS[:1] if options.expandable_segments else PLACEMENTS:
        result = replay(
            stream.events,
            marks_of(stream),
            streams=stream.request_streams,
            capacity_bytes=capacity_bytes,
            options=options,
            placement=make_placement(),
        )
        if result.out_of_memory is not None:
            return result.out_of_memory
    return None
