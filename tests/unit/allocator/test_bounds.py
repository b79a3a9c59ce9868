"""Bounds are the largest outcome over placements."""

from vramfit.allocator import AllocatorOptions, bounds, replay
from vramfit.allocator.replay import PLACEMENTS

MIB = 2**20

# Two segments with a free block of 12 MiB each; which is taken decides where 24 MiB fit later.
TIE = [24 * MIB, 24 * MIB, 0, -1, 12 * MIB, 12 * MIB, -2, 24 * MIB, 11 * MIB]


def test_bounds_are_at_least_the_likely_figures() -> None:
    result = bounds(TIE)

    assert result.likely == replay(TIE)
    assert result.safe_allocated_bytes >= result.likely.peak_allocated_bytes
    assert result.safe_reserved_bytes >= result.likely.peak_reserved_bytes
    assert len(result.replays) == len(PLACEMENTS)


def test_bounds_are_the_same_every_time() -> None:
    assert bounds(TIE) == bounds(TIE)


def test_a_stream_fits_only_if_it_fits_under_every_placement() -> None:
    assert bounds(TIE, capacity_bytes=200 * MIB).fits
    assert not bounds(TIE, capacity_bytes=40 * MIB).fits


def test_retries_of_the_worst_placement_are_reported() -> None:
    assert bounds([30 * MIB, 0, 40 * MIB], capacity_bytes=64 * MIB).num_retries == 1


def test_expandable_segments_need_one_replay() -> None:
    assert len(bounds(TIE, options=AllocatorOptions(expandable_segments=True)).replays) == 1
