"""Expandable segments grow and shrink by pages."""

import pytest

from vramfit.allocator import AllocatorOptions, CachingAllocator, SimulatedOutOfMemory
from vramfit.allocator.options import CapacityKind

MIB = 2**20


def make(capacity_mib: int | None = None, capacity_kind: CapacityKind = "allowed") -> CachingAllocator:
    capacity_bytes = None if capacity_mib is None else capacity_mib * MIB
    options = AllocatorOptions(expandable_segments=True)
    return CachingAllocator(capacity_bytes, options, capacity_kind=capacity_kind)


def test_small_requests_map_2_mib_and_large_ones_20() -> None:
    allocator = make()
    allocator.malloc(1000)
    allocator.malloc(3 * MIB)

    assert sorted(segment.size // MIB for segment in allocator.segments()) == [2, 20]


def test_a_segment_grows_behind_its_free_end() -> None:
    allocator = make()
    allocator.malloc(3 * MIB)
    allocator.malloc(30 * MIB)

    assert allocator.reserved_bytes == 40 * MIB
    assert [block.size // MIB for block in allocator.segments()[0].blocks] == [3, 30, 7]


def test_any_rest_is_split_off() -> None:
    allocator = make()
    allocator.malloc(20 * MIB - 512)

    assert allocator.allocated_bytes == 20 * MIB - 512


def test_a_hole_is_preferred_to_the_end_that_can_grow() -> None:
    allocator = make()
    blocks = [allocator.malloc(size * MIB) for size in (10, 9, 10)]
    hole_address = blocks[1].address
    allocator.free(blocks[1])
    assert allocator.segments()[0].blocks[-1].size == 11 * MIB

    assert allocator.malloc(8 * MIB).address == hole_address


def test_larger_batches_do_not_fragment() -> None:
    allocator = make()
    for size in (30, 31, 32, 33):
        blocks = [allocator.malloc(size * MIB) for _ in range(4)]
        for block in blocks:
            allocator.free(block)

    assert allocator.peak_reserved_bytes == 140 * MIB


def test_emptying_the_cache_unmaps_whole_pages_only() -> None:
    allocator = make()
    first, second, third = (allocator.malloc(size * MIB) for size in (5, 50, 5))
    allocator.free(second)
    allocator.empty_cache()

    assert allocator.reserved_bytes == 40 * MIB
    assert [segment.size // MIB for segment in allocator.segments()] == [20, 20]
    allocator.free(first)
    allocator.free(third)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments()) == (0, [])


def test_unmapped_pages_are_filled_before_the_segment_grows() -> None:
    allocator = make()
    blocks = [allocator.malloc(20 * MIB) for _ in range(3)]
    hole_address = blocks[1].address
    allocator.free(blocks[1])
    allocator.empty_cache()

    assert allocator.malloc(20 * MIB).address == hole_address
    assert len(allocator.segments()) == 1


def test_streams_have_their_own_segments() -> None:
    allocator = make()
    allocator.malloc(3 * MIB, stream=0)
    allocator.malloc(3 * MIB, stream=1)

    assert [segment.stream for segment in allocator.segments()] == [0, 1]


def test_pages_are_freed_when_memory_runs_out() -> None:
    allocator = make(capacity_mib=100)
    blocks = [allocator.malloc(20 * MIB) for _ in range(5)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.malloc(40 * MIB)

    assert (allocator.num_retries, allocator.reserved_bytes) == (1, 100 * MIB)


def test_a_set_limit_can_be_passed_by_part_of_a_page_as_in_pytorch() -> None:
    allocator = make(capacity_mib=30)
    allocator.malloc(30 * MIB)

    assert allocator.reserved_bytes == 40 * MIB


def test_the_memory_of_the_device_cannot_be_passed() -> None:
    allocator = make(capacity_mib=30, capacity_kind="physical")
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(30 * MIB)

    assert allocator.reserved_bytes == 0
    assert allocator.malloc(15 * MIB).size == 15 * MIB


def test_a_free_end_counts_towards_what_the_device_must_have() -> None:
    allocator = make(capacity_mib=40, capacity_kind="physical")
    allocator.malloc(3 * MIB)
    allocator.malloc(37 * MIB)

    assert (allocator.num_retries, allocator.reserved_bytes) == (0, 40 * MIB)


def test_no_batch_is_too_large_to_be_counted() -> None:
    """Predictions without a limit also weigh what nobody would run, such as a million samples in one pass."""
    made = make()
    made.malloc(2**50)
    assert made.reserved_bytes >= 2**50
