"""What holds after any sequence of requests and frees, whatever the options."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramfit.allocator import (
    AllocatorOptions,
    Block,
    CachingAllocator,
    ShuffledPlacement,
    SimulatedOutOfMemory,
    UsedProcessPlacement,
)

MIB = 2**20
SIZES = (
    st.integers(1, 4096)
    | st.integers(1, 3 * MIB)
    | st.integers(1, 64 * MIB)
    | st.sampled_from([MIB, MIB + 1, 2 * MIB, 9 * MIB, 10 * MIB, 20 * MIB, 21 * MIB - 512])
)
STEPS = st.lists(
    st.tuples(st.just("malloc"), SIZES, st.integers(0, 1))
    | st.tuples(st.sampled_from(["free", "free", "free", "empty_cache"]), st.integers(0, 2**16), st.just(0)),
    max_size=80,
)
OPTIONS = st.builds(
    AllocatorOptions,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, None, 20 * MIB, 33 * MIB]),
    roundup_power2_divisions=st.sampled_from([(), (4,) * 16]),
    garbage_collection_threshold=st.sampled_from([None, 0.3]),
)
CAPACITIES = st.sampled_from([None, 64 * MIB, 150 * MIB + 12345])
KINDS = st.sampled_from(["allowed", "physical"])
PLACEMENTS = st.sampled_from([UsedProcessPlacement, lambda: ShuffledPlacement(seed=3)])


def run(allocator: CachingAllocator, steps: list[tuple[str, int, int]]) -> list[Block]:
    """Do the steps, checking peaks on the way; returns what is still held."""
    held: list[Block] = []
    for step, value, stream in steps:
        peaks = allocator.peak_requested_bytes, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        if step == "malloc":
            try:
                held.append(allocator.malloc(value, stream))
            except SimulatedOutOfMemory:
                assert allocator.capacity_bytes is not None
        elif step == "empty_cache":
            allocator.empty_cache()
        elif held:
            allocator.free(held.pop(value % len(held)))
        assert allocator.peak_requested_bytes >= max(peaks[0], allocator.requested_bytes)
        assert allocator.peak_allocated_bytes >= max(peaks[1], allocator.allocated_bytes)
        assert allocator.peak_reserved_bytes >= max(peaks[2], allocator.reserved_bytes)
    return held


def check_segments(allocator: CachingAllocator) -> None:
    segments = allocator.segments()
    assert sum(segment.size for segment in segments) == allocator.reserved_bytes
    assert all(a.address + a.size <= b.address for a, b in pairwise(segments))
    for segment in segments:
        assert segment.blocks[0].address == segment.address
        assert sum(block.size for block in segment.blocks) == segment.size
        for a, b in pairwise(segment.blocks):
            assert a.address + a.size == b.address
            assert "used" in (a.state, b.state), "two free neighbours"
    used = [block for segment in segments for block in segment.blocks if block.state == "used"]
    assert sum(block.size for block in used) == allocator.allocated_bytes
    assert sum(block.requested_bytes for block in used) == allocator.requested_bytes


def check_pools(allocator: CachingAllocator) -> None:
    free = {block.address for segment in allocator.segments() for block in segment.blocks if block.state == "free"}
    pooled = []
    for pools in allocator._pools.values():
        for pool in pools:
            blocks = pool.free_blocks()
            keys = [(block.size, block.address) for block in blocks]
            assert keys == sorted(keys)
            assert len(pool.blocks) == len(pool.keys)
            assert [block.address for block in pool.unmapped] == sorted(block.address for block in pool.unmapped)
            assert not any(block.is_mapped or block.is_free for block in pool.unmapped)
            pooled += [block.address for block in blocks]
    assert sorted(pooled) == sorted(free)


@settings(max_examples=300)
@given(STEPS, OPTIONS, CAPACITIES, KINDS, PLACEMENTS)
def test_blocks_tile_their_segments_and_counters_add_up(steps, options, capacity_bytes, kind, placement) -> None:  # type: ignore[no-untyped-def]
    allocator = CachingAllocator(capacity_bytes, options, placement(), capacity_kind=kind)
    run(allocator, steps)

    check_segments(allocator)
    check_pools(allocator)
    assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
    if capacity_bytes is not None:
        page_bytes = 20 * MIB if options.expandable_segments and kind == "allowed" else 0
        assert allocator.peak_reserved_bytes <= capacity_bytes + page_bytes


@settings(max_examples=150)
@given(STEPS, OPTIONS, CAPACITIES, KINDS)
def test_nothing_is_left_when_all_is_freed_and_the_cache_emptied(steps, options, capacity_bytes, kind) -> None:  # type: ignore[no-untyped-def]
    allocator = CachingAllocator(capacity_bytes, options, capacity_kind=kind)
    for block in run(allocator, steps):
        allocator.free(block)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (0, 0)
    allocator.empty_cache()

    assert (allocator.reserved_bytes, allocator.segments()) == (0, [])


@settings(max_examples=100)
@given(STEPS, OPTIONS, CAPACITIES)
def test_the_same_steps_give_the_same_segments(steps, options, capacity_bytes) -> None:  # type: ignore[no-untyped-def]
    first, second = (CachingAllocator(capacity_bytes, options) for _ in range(2))
    run(first, steps)
    run(second, steps)

    assert first.segments() == second.segments()


@settings(max_examples=100)
@given(STEPS)
def test_requested_bytes_do_not_depend_on_options(steps) -> None:  # type: ignore[no-untyped-def]
    plain = CachingAllocator()
    expandable = CachingAllocator(options=AllocatorOptions(expandable_segments=True))
    run(plain, steps)
    run(expandable, steps)

    assert plain.peak_requested_bytes == expandable.peak_requested_bytes
    assert expandable.peak_allocated_bytes <= plain.peak_allocated_bytes


@pytest.mark.parametrize("expandable", [False, True])
def test_a_failed_request_leaves_used_blocks_where_they_were(expandable: bool) -> None:
    allocator = CachingAllocator(64 * MIB, AllocatorOptions(expandable_segments=expandable))
    held = [allocator.malloc(size * MIB) for size in (3, 18, 4)]
    before = [(block.address, block.size) for block in held]
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(60 * MIB)

    assert [(block.address, block.size) for block in held] == before
    check_segments(allocator)
