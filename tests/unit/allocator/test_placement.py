"""Placements give addresses that never overlap, the same ones every time."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.allocator import (
    AscendingPlacement,
    DescendingPlacement,
    Placement,
    ShuffledPlacement,
    UsedProcessPlacement,
)
from vramfit.allocator.placement import AlternatingPlacement

MIB = 2**20
MAKERS: tuple[Callable[[], Placement], ...] = (
    AscendingPlacement,
    DescendingPlacement,
    UsedProcessPlacement,
    lambda: ShuffledPlacement(seed=7),
    lambda: AlternatingPlacement(seed=7),
)
STEPS = st.lists(st.integers(1, 300) | st.sampled_from(["model_loaded", "cublas_loaded", "release"]), max_size=60)


@given(STEPS)
@pytest.mark.parametrize("make", MAKERS)
def test_segments_never_overlap(make: Callable[[], Placement], steps: list[int | str]) -> None:
    placement = make()
    held: list[tuple[int, int]] = []
    for step in steps:
        if isinstance(step, int):
            held.append((placement.place(2 * step * MIB), 2 * step * MIB))
        elif step == "release":
            if held:
                placement.release(*held.pop(len(held) // 2))
        else:
            placement.on_event("model_loaded" if step == "model_loaded" else "cublas_loaded")

    ranges = sorted(held)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(ranges))


@pytest.mark.parametrize("make", MAKERS)
def test_placements_are_deterministic(make: Callable[[], Placement]) -> None:
    sizes = [2 * MIB, 20 * MIB, 90 * MIB, 12 * MIB]

    assert [make().place(size) for size in sizes] == [make().place(size) for size in sizes]


def test_h200_segments_start_32_mib_chunks_at_descending_addresses() -> None:
    placement = UsedProcessPlacement()
    first, second = placement.place(90 * MIB), placement.place(36 * MIB)

    assert first % (32 * MIB) == second % (32 * MIB) == 0
    assert first - second == 64 * MIB


def test_h200_reuses_the_newest_hole_not_the_tightest() -> None:
    placement = UsedProcessPlacement()
    placement.place(52 * MIB)
    newest = placement.place(48 * MIB)

    assert placement.place(12 * MIB) == newest + 48 * MIB


def test_h200_opens_its_oldest_reservation_once_the_model_is_loaded() -> None:
    placement = UsedProcessPlacement()
    _, _, loaded = (placement.place(size * MIB) for size in (2, 24, 90))
    placement.on_event("model_loaded")
    first, second = placement.place(96 * MIB), placement.place(20 * MIB)

    assert loaded < first
    assert second == first + 96 * MIB


def test_h200_loses_64_mib_to_each_cublas_handle() -> None:
    placement = UsedProcessPlacement()
    placement.on_event("model_loaded")
    first = placement.place(32 * MIB)
    placement.on_event("cublas_loaded")

    assert placement.place(32 * MIB) == first + (32 + 64) * MIB


def test_weights_lie_in_two_ranges_and_what_comes_after_them_in_one() -> None:
    placement = AlternatingPlacement(seed=1)
    weights = [placement.place(32 * MIB) for _ in range(20)]
    placement.on_event("model_loaded")
    later = [placement.place(32 * MIB) for _ in range(20)]
    gaps = [abs(a - b) for a, b in pairwise(sorted(weights))]
    assert sum(gap > 32 * MIB for gap in gaps) == 1
    assert later == sorted(later, reverse=True)
    assert all(b == a - 32 * MIB for a, b in pairwise(later))
