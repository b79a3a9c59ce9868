"""The least that any allocator could do with."""

from vramfit.records.stream import Stream


def peak_requested(stream: Stream) -> int:
    """The most that live requests add up to: no allocator can do with less."""
    sizes: list[int] = []
    live = peak = 0
    for event in stream.events:
        if event > 0:
            sizes.append(event)
            live += event
            if live > peak:
                peak = live
        else:
            live -= sizes[-event]
    return peak
