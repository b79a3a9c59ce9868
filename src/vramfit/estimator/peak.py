"""The least that any allocator could do with."""

from collections.abc import Iterator

from vramfit.records.stream import Stream


def peak_requested(stream: Stream, part: str | None = None) -> int:
    """The most that live requests add up to, in one part of the run or in all: no allocator can do with less."""
    sizes: list[int] = []
    live = peak = 0
    if part is not None:
        return max((top for name, top in _peaks_of_parts(stream) if name == part), default=0)
    for event in stream.events:
        if event > 0:
            sizes.append(event)
            live += event
            if live > peak:
                peak = live
        else:
            live -= sizes[-event]
    return peak


def _peaks_of_parts(stream: Stream) -> Iterator[tuple[str, int]]:
    """Each part of a run with the most that was live in it."""
    begins = [(index, name) for index, name in stream.parts]
    ends = [*(index for index, _ in begins[1:]), len(stream.events)]
    sizes: list[int] = []
    live = 0
    for (begin, name), end in zip(begins, ends, strict=True):
        peak = live
        for event in stream.events[begin:end]:
            if event > 0:
                sizes.append(event)
            live += event if event > 0 else -sizes[-event]
            peak = max(peak, live)
        yield name, peak
