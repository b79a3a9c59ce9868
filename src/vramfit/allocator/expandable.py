"""Expandable segments: address space reserved once, memory mapped into it page by page.

Follows `find_expandable_block`, `map_block`, `try_allocate_expandable_block` and `unmap_block` of
c10/cuda/CUDACachingAllocator.cpp (torch 2.13).
"""

from bisect import insort

from vramfit.allocator.pool import Block, Pool
from vramfit.allocator.rules import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, DeviceMemory

# PyTorch reserves 9/8 of the GPU's memory; this, in whole pages of both sizes, is not used up by any batch either.
_RESERVATION_BYTES = LARGE_SEGMENT_BYTES << 34


class ExpandableSegments:
    """All expandable segments of one allocator."""

    def __init__(self, device: DeviceMemory, heads: dict[int, Block]) -> None:
        self._device = device
        self._heads = heads
        self._num_reservations = 0

    def grow(self, pool: Pool, size: int) -> Block | None:
        """A block of at least `size` bytes, at the lowest address where pages can be added.

        None if memory runs out; what was mapped by then stays mapped, as free blocks.
        """
        block: Block | None = self._find_room(pool, size)
        assert block is not None
        if not block.is_mapped:
            block = self._map(block, min(size, block.size))
        while block is not None and block.size < size:
            room = block.next
            assert room is not None
            block = self._map(room, min(size - block.size, room.size))
        if block is not None:
            pool.remove(block)
        return block

    def unmap(self, block: Block) -> None:
        """Give back the whole pages inside a free block, and its segment if nothing else is in it."""
        pool = block.pool
        page_bytes = _page_bytes(pool)
        begin = -(-block.address // page_bytes) * page_bytes
        end = (block.address + block.size) // page_bytes * page_bytes
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            pages = block.cut(begin - block.address)
            pool.insert(block)
        else:
            pages = block
        if end < pages.address + pages.size:
            pool.insert(pages.cut(end - begin))
        self._device.give_back(end - begin)
        pages = _put_back_unmapped(pages)
        if pages.is_whole_segment:
            pool.unmapped.remove(pages)
            del self._heads[pages.address]

    def _find_room(self, pool: Pool, size: int) -> Block:
        for block in pool.unmapped:
            before = block.prev
            first = before if before is not None and _is_unused(before) else block
            if _has_room(first, size):
                return first
        block = Block(self._num_reservations * _RESERVATION_BYTES, _RESERVATION_BYTES, pool)
        self._num_reservations += 1
        self._heads[block.address] = block
        return _put_back_unmapped(block)

    def _map(self, block: Block, size: int) -> Block | None:
        """Put memory behind the first `size` bytes of an unmapped block, in whole pages."""
        pool = block.pool
        page_bytes = _page_bytes(pool)
        mapped_bytes = -(-size // page_bytes) * page_bytes
        if not self._device.take(mapped_bytes):
            return None
        pool.unmapped.remove(block)
        block.is_mapped = True
        if mapped_bytes < block.size:
            _put_back_unmapped(block.cut(mapped_bytes))
        return pool.put_back(block)


def _page_bytes(pool: Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES


def _is_unused(block: Block) -> bool:
    return block.is_free or not block.is_mapped


def _has_room(block: Block | None, size: int) -> bool:
    while block is not None and size > 0 and _is_unused(block):
        size -= block.size
        block = block.next
    return size <= 0


def _put_back_unmapped(block: Block) -> Block:
    """Mark a block as unmapped and merge it with unmapped neighbours; returns what they are now."""
    unmapped = block.pool.unmapped
    block.is_mapped = block.is_free = False
    before, after = block.prev, block.next
    if after is not None and not after.is_mapped:
        unmapped.remove(after)
        block.absorb_next()
    if before is not None and not before.is_mapped:
        before.absorb_next()
        return before
    insort(unmapped, block, key=lambda other: other.address)
    return block
