"""The allocator behaves as PyTorch's does."""

import pytest

from vramfit.allocator import AllocatorOptions, AscendingPlacement, CachingAllocator, SimulatedOutOfMemory

MIB = 2**20


def make(capacity_mib: int | None = None, **options: object) -> CachingAllocator:
    capacity_bytes = None if capacity_mib is None else capacity_mib * MIB
    return CachingAllocator(capacity_bytes, AllocatorOptions(**options), AscendingPlacement())  # type: ignore[arg-type]


def test_small_and_large_requests_have_their_own_segments() -> None:
    allocator = make()
    allocator.malloc(1000)
    allocator.malloc(3 * MIB)

    assert [(segment.size // MIB, segment.small) for segment in allocator.segments()] == [
        (2, True),
        (20, False),
    ]


def test_a_rest_of_up_to_1_mib_stays_with_a_large_block() -> None:
    allocator = make()
    allocator.malloc(11 * MIB)

    assert (allocator.requested_bytes, allocator.allocated_bytes) == (11 * MIB, 12 * MIB)


def test_a_larger_rest_is_split_off() -> None:
    allocator = make()
    allocator.malloc(11 * MIB - 512)

    assert allocator.allocated_bytes == 11 * MIB - 512
    assert [block.size for block in allocator.segments()[0].blocks] == [11 * MIB - 512, MIB + 512]


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = make()
    wide, tight = allocator.malloc(40 * MIB), allocator.malloc(30 * MIB)
    tight_address = tight.address
    allocator.free(wide)
    allocator.free(tight)

    assert allocator.malloc(25 * MIB).address == tight_address


def test_of_equally_large_free_blocks_the_lowest_is_taken() -> None:
    allocator = make()
    first, second = allocator.malloc(30 * MIB), allocator.malloc(30 * MIB)
    address = first.address
    allocator.free(second)
    allocator.free(first)

    assert allocator.malloc(30 * MIB).address == address


def test_free_neighbours_merge() -> None:
    allocator = make()
    blocks = [allocator.malloc(4 * MIB) for _ in range(5)]
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block)

    assert [block.size // MIB for block in allocator.segments()[0].blocks] == [4, 12, 4]


def test_streams_do_not_share_blocks() -> None:
    allocator = make()
    allocator.free(allocator.malloc(3 * MIB, stream=1))
    allocator.malloc(3 * MIB, stream=2)

    assert [segment.stream for segment in allocator.segments()] == [1, 2]


def test_a_block_cannot_be_freed_twice() -> None:
    allocator = make()
    block = allocator.malloc(1000)
    allocator.free(block)

    with pytest.raises(ValueError, match="free already"):
        allocator.free(block)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_nothing_cannot_be_allocated(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="cannot be allocated"):
        make().malloc(num_bytes)


def test_peaks_stay_until_they_are_reset() -> None:
    allocator = make()
    allocator.free(allocator.malloc(30 * MIB))
    assert (allocator.peak_requested_bytes, allocator.peak_allocated_bytes) == (30 * MIB, 30 * MIB)

    allocator.reset_peaks()
    assert (allocator.peak_requested_bytes, allocator.peak_allocated_bytes) == (0, 0)
    assert allocator.peak_reserved_bytes == allocator.reserved_bytes == 30 * MIB


def test_emptying_the_cache_keeps_segments_in_use() -> None:
    allocator = make()
    allocator.malloc(3 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.empty_cache()

    assert allocator.reserved_bytes == 20 * MIB


def test_cached_segments_are_freed_when_memory_runs_out() -> None:
    allocator = make(capacity_mib=50)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(40 * MIB)

    assert (allocator.num_retries, allocator.num_ooms) == (1, 0)
    assert allocator.reserved_bytes == 40 * MIB


def test_what_does_not_fit_raises_with_the_figures() -> None:
    allocator = make(capacity_mib=50)
    allocator.malloc(30 * MIB)
    with pytest.raises(SimulatedOutOfMemory) as caught:
        allocator.malloc(21 * MIB)

    error = caught.value
    assert (error.requested_bytes, error.allocated_bytes) == (21 * MIB, 30 * MIB)
    assert (error.reserved_bytes, error.capacity_bytes) == (30 * MIB, 50 * MIB)
    assert (allocator.num_retries, allocator.num_ooms) == (1, 1)
    assert "50.00 MiB" in str(error)


def test_a_split_segment_is_not_freed_to_make_room() -> None:
    allocator = make(capacity_mib=40)
    allocator.free(allocator.malloc(18 * MIB))
    allocator.malloc(3 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(24 * MIB)

    assert allocator.reserved_bytes == 18 * MIB


def test_a_request_that_failed_can_be_made_again_after_a_free() -> None:
    allocator = make(capacity_mib=50)
    block = allocator.malloc(30 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(40 * MIB)
    allocator.free(block)

    assert allocator.malloc(40 * MIB).size == 40 * MIB


class TestMaxSplitSize:
    """Blocks of `max_split_size` and more are kept whole, for requests of that size."""

    def test_a_large_block_is_not_split(self) -> None:
        allocator = make(max_split_size_bytes=40 * MIB)
        allocator.free(allocator.malloc(60 * MIB))
        allocator.malloc(50 * MIB)

        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (60 * MIB, 60 * MIB)

    def test_a_large_block_does_not_serve_a_small_request(self) -> None:
        allocator = make(max_split_size_bytes=40 * MIB)
        allocator.free(allocator.malloc(60 * MIB))
        allocator.malloc(30 * MIB)

        assert allocator.reserved_bytes == 90 * MIB

    def test_a_block_much_larger_than_a_large_request_is_left_alone(self) -> None:
        allocator = make(max_split_size_bytes=40 * MIB)
        allocator.free(allocator.malloc(60 * MIB))
        allocator.malloc(40 * MIB)

        assert allocator.reserved_bytes == 100 * MIB

    def test_one_large_block_that_is_enough_is_freed_first(self) -> None:
        allocator = make(capacity_mib=200, max_split_size_bytes=40 * MIB)
        blocks = [allocator.malloc(size * MIB) for size in (50, 80, 60)]
        for block in blocks:
            allocator.free(block)
        allocator.malloc(30 * MIB)

        assert allocator.num_retries == 0
        assert allocator.reserved_bytes == (80 + 60 + 30) * MIB

    def test_several_large_blocks_are_freed_from_the_largest_on(self) -> None:
        allocator = make(capacity_mib=190, max_split_size_bytes=40 * MIB)
        blocks = [allocator.malloc(size * MIB) for size in (50, 80, 60)]
        for block in blocks:
            allocator.free(block)
        allocator.malloc(120 * MIB)

        assert allocator.num_retries == 0
        assert allocator.reserved_bytes == (50 + 120) * MIB


class TestGarbageCollection:
    """Above the threshold, segments unused for longest are freed before a new one is made."""

    def test_old_segments_are_freed_and_young_ones_kept(self) -> None:
        allocator = make(capacity_mib=200, garbage_collection_threshold=0.5)
        old, young = allocator.malloc(60 * MIB), allocator.malloc(70 * MIB)
        allocator.free(old)
        for _ in range(5):
            allocator.free(young)
            young = allocator.malloc(70 * MIB)
        allocator.free(young)
        allocator.malloc(80 * MIB)

        assert sorted(segment.size // MIB for segment in allocator.segments()) == [70, 80]
        assert allocator.num_retries == 0

    def test_nothing_is_freed_below_the_threshold(self) -> None:
        allocator = make(capacity_mib=1000, garbage_collection_threshold=0.5)
        allocator.free(allocator.malloc(60 * MIB))
        allocator.malloc(80 * MIB)

        assert allocator.reserved_bytes == 140 * MIB
