"""Blocks, the pools of free ones in best-fit order, and expandable segments.

An expandable segment reserves addresses once and maps memory into them page by page, as `find_expandable_block`,
`map_block`, `try_allocate_expandable_block` and `unmap_block` of c10/cuda/CUDACachingAllocator.cpp (torch 2.13) do.
"""

from bisect import bisect_left, insort

from vramfit.allocator.options import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorOptions,
    DeviceMemory,
)

ADDRESS_BITS = 64
UNLIMITED_BYTES = 1 << 62


class Block:
    """A range of one segment: in use, free (then in its pool), or address space without memory."""

    __slots__ = ("address", "born", "is_free", "is_mapped", "next", "pool", "prev", "requested_bytes", "size")

    def __init__(self, address: int, size: int, pool: "Pool") -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.prev: Block | None = None
        self.next: Block | None = None
        self.requested_bytes = 0
        self.is_free = True
        self.is_mapped = True
        self.born = 0  # `Pool.num_searches` when it became free

    @property
    def is_whole_segment(self) -> bool:
        return self.prev is None and self.next is None

    def cut(self, size: int) -> "Block":
        """Keep the first `size` bytes and return the rest as a new block."""
        rest = Block(self.address + size, self.size - size, self.pool)
        rest.prev = self
        rest.next = after = self.next
        if after is not None:
            after.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Take over the block behind, which is gone then."""
        taken = self.next
        assert taken is not None
        self.size += taken.size
        self.next = after = taken.next
        if after is not None:
            after.prev = self


class Pool:
    """The free blocks of one stream and one size class, by size, then address (`BlockComparatorSize`)."""

    __slots__ = (
        "always_splits",
        "blocks",
        "grows",
        "has_limit",
        "keys",
        "max_rounding_bytes",
        "max_split_bytes",
        "min_rest_bytes",
        "num_searches",
        "small",
        "stream",
        "unmapped",
    )

    def __init__(self, stream: int, small: bool, options: AllocatorOptions) -> None:
        self.stream = stream
        self.small = small
        self.keys: list[int] = []  # size << ADDRESS_BITS | address: sorts as (size, address), and quickly
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []  # by address; of expandable segments
        self.num_searches = 0
        self.max_split_bytes = options.max_split_size_bytes or UNLIMITED_BYTES
        self.max_rounding_bytes = options.max_non_split_rounding_bytes
        # `should_split`: the rest becomes a block of its own from this size on.
        always_split = small or options.expandable_segments  # whatever `max_split_size` says
        self.always_splits = always_split
        self.min_rest_bytes = MIN_BLOCK_BYTES if always_split else SMALL_REQUEST_BYTES + 1
        self.grows = options.expandable_segments
        self.has_limit = options.max_split_size_bytes is not None

    def take(self, size: int) -> Block | None:
        """Remove and return the best fit for `size` bytes, if there is one (`get_free_block`)."""
        self.num_searches += 1
        keys = self.keys
        i = bisect_left(keys, size << ADDRESS_BITS)
        if i == len(keys):
            return None
        if self.grows:
            after = self.blocks[keys[i]].next
            if after is not None and not after.is_mapped:
                i = self._stretch(i)
        if self.has_limit and not self._may_serve(self.blocks[keys[i]].size, size):
            return None
        return self.blocks.pop(keys.pop(i))

    def insert(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block
        block.is_free = True
        block.born = self.num_searches

    def remove(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def put_back(self, block: Block) -> Block:
        """Merge a block with its free neighbours into the pool; returns what they are now."""
        before = block.prev
        if before is not None and before.is_free:
            self.remove(before)
            before.absorb_next()
            block = before
        after = block.next
        if after is not None and after.is_free:
            self.remove(after)
            block.absorb_next()
        self.insert(block)
        return block

    def free_blocks(self) -> list[Block]:
        """The free blocks, smallest first."""
        return [self.blocks[key] for key in self.keys]

    def _stretch(self, i: int) -> int:
        """A block that can grow counts with what it can grow to: a larger fixed one may fit better.

        One that cannot is the best fit already.
        """
        reach = _reach(self.blocks[self.keys[i]])
        while i + 1 < len(self.keys):
            next_reach = _reach(self.blocks[self.keys[i + 1]])
            if next_reach >= reach:
                break
            i, reach = i + 1, next_reach
        return i

    def _may_serve(self, block_bytes: int, size: int) -> bool:
        """Whether `max_split_size` lets a block of `block_bytes` serve a request of `size`."""
        if size < self.max_split_bytes:
            return block_bytes < self.max_split_bytes
        return block_bytes < size + self.max_rounding_bytes


def _reach(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


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
