"""The least that any allocator could do with."""

from vramfit.records.stream import Stream


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
