"""`weigh`: a stream against a capacity, over the states a process may be in and the placements seen."""

from dataclasses import dataclass

from vramfit.allocator.bounds import PLACEMENTS, bounds
from vramfit.allocator.options import AllocatorOptions
from vramfit.allocator.placement import UsedProcessPlacement
from vramfit.allocator.replay import Mark, OutOfMemoryEvent, ReplayResult, replay
from vramfit.estimator.states import warmed
from vramfit.records.stream import Stream


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stream takes and whether that stays inside the capacity."""

    likely: ReplayResult
    """In a fresh process, where segments most likely lie."""
    safe_reserved_bytes: int
    fits: bool | None
    fits_cold: bool | None
    num_retries: int = 0


def weigh(stream: Stream, marks: list[Mark], options: AllocatorOptions, capacity_bytes: int | None) -> Outcome:
    """Replay freely, cold and warm, and inside the capacity where that would be passed."""
    cold = bounds(stream.events, marks, options=options)
    warm = replay(*warmed(stream, marks), options=options, placement=UsedProcessPlacement())
    safe_bytes = max(cold.safe_reserved_bytes, warm.peak_reserved_bytes)
    if capacity_bytes is None:
        return Outcome(cold.likely, safe_bytes, None, None)
    if safe_bytes <= capacity_bytes:
        return Outcome(cold.likely, safe_bytes, True, True)
    if cold.likely.peak_requested_bytes > capacity_bytes:
        return Outcome(cold.likely, safe_bytes, False, False)  # not even without any waste
    capped = bounds(*warmed(stream, marks), options=options, capacity_bytes=capacity_bytes)
    capped_cold = bounds(stream.events, marks, options=options, capacity_bytes=capacity_bytes)
    if not capped.fits:
        return Outcome(cold.likely, safe_bytes, False, capped_cold.fits)
    likely = capped_cold.likely if capped_cold.fits else capped.likely
    return Outcome(likely, min(safe_bytes, capacity_bytes), True, capped_cold.fits, capped.num_retries)


def fails(
    events: list[int], marks: list[Mark], options: AllocatorOptions, capacity_bytes: int
) -> OutOfMemoryEvent | None:
    """The request that does not fit under some placement; None if it runs under all. The likeliest comes first."""
    for make_placement in PLACEMENTS[:1] if options.expandable_segments else PLACEMENTS:
        result = replay(events, marks, capacity_bytes=capacity_bytes, options=options, placement=make_placement())
        if result.out_of_memory is not None:
            return result.out_of_memory
    return None
