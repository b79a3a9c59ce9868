"""The largest batch that runs, searched for as anybody would: on a GPU, or in a simulated allocator."""

from collections.abc import Callable
from typing import Any

NUM_ABOVE = 6
"""Batches above an edge that are tried too, and one percent of it: fitting is not monotone."""


def search(runs: Callable[[int], bool]) -> dict[str, Any]:
    """The largest batch that runs: doubling, bisection, and sizes above the edge one by one."""
    tried: dict[int, bool] = {}

    def fits(batch: int) -> bool:
        if batch not in tried:
            tried[batch] = runs(batch)
        return tried[batch]

    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    above = [batch for batch in range(low + 1, low + 2 + max(NUM_ABOVE, low // 100)) if fits(batch)]
    return {
        "batch": max([low, *above]),
        "first_edge": low,
        "ran": sorted(batch for batch, ok in tried.items() if ok),
        "ran_out": sorted(batch for batch, ok in tried.items() if not ok),
    }
