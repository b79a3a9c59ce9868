"""`predict_peaks`: the peaks of a stream inside a capacity, for every process state and placement that was seen."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest

from vramfit.allocator.options import AllocatorOptions, round_request, segment_bytes_for
from vramfit.allocator.placement import UsedProcessPlacement
from vramfit.allocator.replay import (
    LOADING_PLACEMENTS,
    OTHER_PLACEMENTS,
    PLACEMENTS,
    MakePlacement,
    Mark,
    OutOfMemoryEvent,
    PlacementBounds,
    ReplayResult,
    bounds,
    replay,
)
from vramfit.records.stream import Stream
from vramfit.stages import tell
from vramfit.trace.template import (
    RECORDING_STREAM,
    CallTemplate,
    Entry,
    Launch,
    Part,
    Release,
    Request,
    StreamTemplate,
    Turn,
)
from vramfit.trace.work import Polynomial, evaluate


def warm_stream(stream: Stream) -> Stream:
    """The stream of a warm process: workspaces first, all else as it was.

    A stream that passes are recorded on is new, and so are its workspaces.
    """
    operators = [stream.origins[origin].operator for origin in stream.request_origins]
    is_early = {
        request
        for request, operator in enumerate(operators)
        if operator.endswith("_workspace") and stream.request_streams.get(request) != RECORDING_STREAM
    }
    early, rest = sorted(is_early), [request for request in range(stream.num_requests) if request not in is_early]
    number = {request: i for i, request in enumerate([*early, *rest])}
    sizes = [event for event in stream.events if event > 0]
    events = [sizes[request] for request in early]
    moved_to: list[int] = []
    request = 0
    for event in stream.events:
        moved_to.append(len(events))
        if event <= 0:
            events.append(-number[-event])
            continue
        if request not in is_early:
            events.append(event)
        request += 1
    moved_to.append(len(events))
    return Stream(
        events=events,
        request_origins=[stream.request_origins[request] for request in [*early, *rest]],
        origins=stream.origins,
        marks=[replace(m, index=moved_to[m.index]) for m in stream.marks if m.name != "cublas_loaded"],
        parts=[(moved_to[index], part) for index, part in stream.parts],
        request_streams={number[request]: cuda_stream for request, cuda_stream in stream.request_streams.items()},
    )


def marks_of(stream: Stream) -> list[Mark]:
    """The stream's marks as the allocator takes them."""
    return [Mark(index=m.index, kind=m.kind, name=m.name) for m in stream.marks]


def peak_requested(stream: Stream) -> int:
    """The most that live requests add up to: no allocator can do with less."""
    return max(peaks_of_parts(stream).values())


def peaks_of_parts(stream: Stream) -> dict[str, int]:
    """Part of the run → the most that live requests add up to in it; before the first part, by an empty name."""
    begins = [(0, ""), *stream.parts]
    ends = [*(index for index, _ in stream.parts), len(stream.events)]
    peaks: dict[str, int] = {}
    sizes: list[int] = []
    live = 0
    for (begin, name), end in zip(begins, ends, strict=True):
        peak = max(live, peaks.get(name, 0))
        for event in stream.events[begin:end]:
            if event > 0:
                sizes.append(event)
                live += event
                if live > peak:
                    peak = live
            else:
                live -= sizes[-event]
        peaks[name] = peak
    return peaks


Called = tuple[CallTemplate, tuple[bool, ...]]
"""A kernel with requests of its own, and which of its outputs are asked for."""


class Asked:
    """`peaks_of_parts` of a run at any batch, without a stream for each.

    What is live after an entry is a polynomial of the batch. Of all that come in a part of a run, few are the largest
    at any batch: a polynomial that has no larger coefficient than another one never is.

    Args:
        order: of its segments; all of them at one batch.
    """

    def __init__(self, template: StreamTemplate, order: Iterable[Turn]) -> None:
        self._profile = template.profile
        self._live: Polynomial = ()
        self._sizes: dict[int, Polynomial] = {}
        self._parts: dict[str, dict[Called | None, set[Polynomial]]] = {"": {None: {()}}}
        self._found = self._parts[""]
        for name, *_ in order:
            for entry in template.segments[name]:
                self._add(entry)
        for found in self._parts.values():
            for called, sums in found.items():
                found[called] = _largest(sums)

    def peaks(self, batch: int) -> dict[str, int]:
        """As `peaks_of_parts` of the stream at this batch."""
        own: dict[Called | None, int] = {None: 0}
        for called in {called for found in self._parts.values() for called in found if called is not None}:
            own[called] = self._own_peak(called, batch)
        return {
            part: max(evaluate(each, batch) + own[called] for called, sums in found.items() for each in sums)
            for part, found in self._parts.items()
        }

    def _add(self, entry: Entry) -> None:
        if isinstance(entry, Request):
            self._take(entry.id, entry.size)
        elif isinstance(entry, Release):
            self._live = _sum(self._live, self._sizes.pop(entry.id), -1)
        elif isinstance(entry, Launch):
            called = entry.call, tuple(map(bool, entry.outputs))
            self._found.setdefault(called, set()).add(self._live)
            for output, size in zip(entry.outputs, entry.call.sizes, strict=False):
                if output:
                    self._take(output, size)
        elif isinstance(entry, Part):
            self._found = self._parts.setdefault(entry.name, {None: set()})
            self._found[None].add(self._live)

    def _take(self, id_: int, size: Polynomial) -> None:
        self._sizes[id_] = size
        self._live = _sum(self._live, size)
        self._found[None].add(self._live)

    def _own_peak(self, called: Called, batch: int) -> int:
        """What a kernel asks for at once, at the most."""
        call, wanted = called
        live = peak = 0
        temporaries: dict[int, int] = {}
        for kind, index, size in call.script(batch, self._profile):
            if kind == "free":
                live -= temporaries.pop(index)
                continue
            if kind == "out" and not wanted[index]:
                continue
            if kind == "temp":
                temporaries[index] = size
            live += size
            peak = max(peak, live)
        return peak


def _sum(a: Polynomial, b: Polynomial, sign: int = 1) -> Polynomial:
    return tuple(x + sign * y for x, y in zip_longest(a, b, fillvalue=0))


def _largest(sums: set[Polynomial]) -> set[Polynomial]:
    """Those that are not below another one at every batch."""
    kept: list[Polynomial] = []
    for each in sorted(sums, key=lambda p: (sum(p), p), reverse=True):
        if not any(all(x <= y for x, y in zip_longest(each, other, fillvalue=0)) for other in kept):
            kept.append(each)
    return set(kept)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stream takes and whether that stays inside the capacity."""

    likely: ReplayResult
    """The replay whose figures are given."""
    make_placement: MakePlacement
    """The placement of that replay."""
    replays: tuple[ReplayResult, ...]
    """All that the peaks of phases are taken from."""
    stream: Stream
    """The stream of that replay: a cold process's, unless only a warm one fits."""
    replayed_capacity_bytes: int | None
    """The capacity of that replay; None where it ran freely."""
    safe_reserved_bytes: int
    fits: bool | None
    fits_cold: bool | None
    num_retries: int = 0


def predict_peaks(cold: Stream, options: AllocatorOptions, capacity_bytes: int | None) -> Outcome:
    """Replay freely, cold and warm, and inside the capacity where that would be passed."""
    tell("replaying the allocator")
    warm = warm_stream(cold)
    free = _bounds(cold, options, None)
    warm_free = replay(
        warm.events, marks_of(warm), streams=warm.request_streams, options=options, placement=UsedProcessPlacement()
    )
    safe_bytes = _safe_bytes(cold, options, free, warm_free)
    shown = (*_shown(free, cold), cold, None, safe_bytes)
    if capacity_bytes is None:
        return Outcome(*shown, None, None)
    if safe_bytes <= capacity_bytes:
        return Outcome(*shown, True, True)
    if free.likely.peak_requested_bytes > capacity_bytes:
        return Outcome(*shown, False, False)  # not even without any waste
    capped, capped_cold = _bounds(warm, options, capacity_bytes), _bounds(cold, options, capacity_bytes)
    if not capped.fits:
        return Outcome(*shown, False, capped_cold.fits)
    kept = (*_shown(capped_cold, cold), cold) if capped_cold.fits else (*_shown(capped, warm), warm)
    safe_bytes = min(safe_bytes, capacity_bytes)
    return Outcome(*kept, capacity_bytes, safe_bytes, True, capped_cold.fits, capped.num_retries)


def _safe_bytes(cold: Stream, options: AllocatorOptions, free: PlacementBounds, warm_free: ReplayResult) -> int:
    """What is reserved at most, wherever the driver puts segments.

    Addresses decide ties between free blocks of one size and nothing else. Where the placements tried differ in what
    they reserve, another one may reserve more than all of them: as much is added as they differ by (`tests/truth/
    test_reserved_bound.py` has a run that reserved one small segment more). Segments that grow have no such ties.
    """
    top_bytes = max(free.safe_reserved_bytes, warm_free.peak_reserved_bytes)
    if options.expandable_segments or cold.request_streams:
        return top_bytes
    others = _bounds(cold, options, None, OTHER_PLACEMENTS)
    peaks = [result.peak_reserved_bytes for result in (*free.replays, *others.replays)]
    return max(top_bytes, *peaks) + max(peaks) - min(peaks)


def _placements(stream: Stream) -> tuple[MakePlacement, ...]:
    """Shards are cut from weights that then go: where these lay decides what is found free."""
    return (*PLACEMENTS, *LOADING_PLACEMENTS) if stream.request_streams else PLACEMENTS


def _shown(found: PlacementBounds, stream: Stream) -> tuple[ReplayResult, MakePlacement, tuple[ReplayResult, ...]]:
    """The likeliest replay; of shards, whose placement is anybody's guess, the one that takes most."""
    if not stream.request_streams:
        return found.likely, PLACEMENTS[0], (found.likely,)
    pairs = zip(found.replays, _placements(stream), strict=False)
    most, make_placement = max(pairs, key=lambda pair: pair[0].peak_allocated_bytes)
    return most, make_placement, found.replays


def _bounds(
    stream: Stream,
    options: AllocatorOptions,
    capacity_bytes: int | None,
    placements: tuple[MakePlacement, ...] | None = None,
) -> PlacementBounds:
    return bounds(
        stream.events,
        marks_of(stream),
        streams=stream.request_streams,
        placements=placements or _placements(stream),
        options=options,
        capacity_bytes=capacity_bytes,
    )


def restart_bytes(stream: Stream, options: AllocatorOptions) -> int:
    """What has to be allowed for the last step to be done again after all that was cached has been given back.

    That is what stays reserved, pages with something in them included, and the largest request of the step at once:
    PyTorch wants room for all of it, also where a part of its pages is there.
    """
    end, marks = len(stream.events), marks_of(stream)
    begin = max(mark.index for mark in marks if mark.kind == "phase")
    marks += [Mark(index=end, kind="empty_cache"), Mark(index=end, kind="phase", name="given back")]
    found = replay(stream.events, marks, streams=stream.request_streams, options=options, placement=PLACEMENTS[0]())
    largest_bytes = max(stream.events[begin:], default=0)
    return found.phases[-1].peak_reserved_bytes + segment_bytes_for(round_request(largest_bytes))


def fails(stream: Stream, options: AllocatorOptions, capacity_bytes: int) -> OutOfMemoryEvent | None:
    """The request that does not fit under some placement; None if it runs under all. The likeliest comes first."""
    for make_placement in _placements(stream)[: 1 if options.expandable_segments else None]:
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
