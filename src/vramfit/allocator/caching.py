"""`CachingAllocator`: PyTorch's CUDA caching allocator, simulated; and `Segment`, what it holds at one moment.

Follows `DeviceCachingAllocator` of c10/cuda/CUDACachingAllocator.cpp (torch 2.10 to 2.13), whose function
names the comments give. Left out: CUDA graphs and private pools, blocks waiting for events of other streams.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from vramfit.allocator.options import (
    MIN_BLOCK_BYTES,
    SMALL_REQUEST_BYTES,
    AllocatorOptions,
    CapacityKind,
    DeviceMemory,
    round_request,
    segment_bytes_for,
)
from vramfit.allocator.placement import FreshPlacement, Placement
from vramfit.allocator.pool import Block, ExpandableSegments, Pool
from vramfit.errors import VramfitError
from vramfit.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockState:
    """One block of a segment."""

    address: int
    size: int
    requested_bytes: int
    """What was asked for; 0 for a free block."""
    state: Literal["used", "free"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A range of device memory; of an expandable segment, one range without gaps."""

    address: int
    size: int
    stream: int
    small: bool
    blocks: tuple[BlockState, ...]


def take_snapshot(heads: Iterable[Block]) -> list[Segment]:
    """The segments that begin with these blocks, by address."""
    segments = []
    for head in sorted(heads, key=lambda block: block.address):
        run: list[Block] = []
        block: Block | None = head
        while block is not None:
            if block.is_mapped:
                run.append(block)
            elif run:
                segments.append(_segment(run))
                run = []
            block = block.next
        if run:
            segments.append(_segment(run))
    return segments


def _segment(run: list[Block]) -> Segment:
    return Segment(
        address=run[0].address,
        size=sum(block.size for block in run),
        stream=run[0].pool.stream,
        small=run[0].pool.small,
        blocks=tuple(_state(block) for block in run),
    )


def _state(block: Block) -> BlockState:
    return BlockState(
        address=block.address,
        size=block.size,
        requested_bytes=0 if block.is_free else block.requested_bytes,
        state="free" if block.is_free else "used",
    )


class SimulatedOutOfMemory(VramfitError):
    """A request that does not fit, after everything cached was given back."""

    exit_code = 3

    def __init__(self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int) -> None:
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes
        super().__init__(
            f"{format_bytes(requested_bytes)} do not fit: of {format_bytes(capacity_bytes)}, "
            f"{format_bytes(reserved_bytes)} are reserved and {format_bytes(allocated_bytes)} allocated",
            hint="a smaller batch, checkpointing or another GPU; expandable_segments:True if much is "
            "reserved and not allocated",
        )


class CachingAllocator:
    """The allocator of one device, with its counters.

    `requested_bytes`, `allocated_bytes` and `reserved_bytes` are the current figures, `peak_*` their peaks
    since the start or the last `reset_peaks()`, `num_retries` how often everything cached was given back to
    make room (`num_alloc_retries`), `num_ooms` how often even that was not enough.

    Args:
        capacity_bytes: what may be reserved; None for no limit.
        options: as in PYTORCH_ALLOC_CONF.
        placement: where segments go; `FreshPlacement()` if not given.
        capacity_kind: "allowed": a limit set with `set_per_process_memory_fraction`, which expandable
            segments can pass by less than one 20 MiB page, as they do in PyTorch. "physical": what the
            device has; nothing passes it, and there is no garbage collection threshold.

    >>> allocator = CachingAllocator()
    >>> block = allocator.malloc(3 * 2**20)
    >>> allocator.allocated_bytes // 2**20, allocator.reserved_bytes // 2**20
    (3, 20)
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        options: AllocatorOptions | None = None,
        placement: Placement | None = None,
        *,
        capacity_kind: CapacityKind = "allowed",
    ) -> None:
        self.options = options or AllocatorOptions()
        self.placement = placement or FreshPlacement()
        self.requested_bytes = self.peak_requested_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.num_retries = self.num_ooms = 0
        self._device = DeviceMemory(capacity_bytes, capacity_kind)
        self._divisions = self.options.roundup_power2_divisions
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # by stream: small, large
        self._heads: dict[int, Block] = {}  # the first block of each segment, by address
        self._expandable = ExpandableSegments(self._device, self._heads)

    @property
    def capacity_bytes(self) -> int | None:
        return self._device.capacity_bytes

    def set_capacity(self, capacity_bytes: int | None) -> None:
        """Change what may be reserved from now on; what is reserved already stays."""
        self._device.capacity_bytes = capacity_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._device.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self._device.peak_reserved_bytes

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """Allocate `num_bytes` (at least 1; PyTorch asks for nothing when a tensor is empty).

        Raises:
            SimulatedOutOfMemory: it does not fit. Nothing changed but that cached segments were freed.
        """
        if num_bytes < 1:
            raise ValueError(f"{num_bytes} bytes cannot be allocated")
        if self._divisions:
            size = round_request(num_bytes, self._divisions)
        else:  # the same without the call: this is the hot path
            size = (num_bytes + MIN_BLOCK_BYTES - 1) // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES
        pools = self._pools.get(stream) or self._add_stream(stream)
        pool = pools[size > SMALL_REQUEST_BYTES]
        block = pool.take(size) or self._grow(pool, size, num_bytes)
        if block.size - size >= pool.min_rest_bytes and (size < pool.max_split_bytes or pool.always_splits):
            pool.insert(block.cut(size))
        block.is_free = False
        block.requested_bytes = num_bytes
        self.requested_bytes += num_bytes
        self.allocated_bytes += block.size
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Free what `malloc` returned."""
        if block.is_free:
            raise ValueError(f"the block at {block.address:#x} is free already")
        block.is_free = True
        self.requested_bytes -= block.requested_bytes
        self.allocated_bytes -= block.size
        block.pool.put_back(block)

    def empty_cache(self) -> None:
        """Give back every segment, or page, with nothing in it (`release_cached_blocks`)."""
        for small in (False, True):
            for pool in self._pools_of(small):
                for block in pool.free_blocks():
                    if self.options.expandable_segments:
                        self._expandable.unmap(block)
                    elif block.is_whole_segment:
                        self._release(block)

    def reset_peaks(self) -> None:
        """Set every peak to the current figure (`torch.cuda.reset_peak_memory_stats`)."""
        self.peak_requested_bytes = self.requested_bytes
        self.peak_allocated_bytes = self.allocated_bytes
        self._device.peak_reserved_bytes = self._device.reserved_bytes

    def segments(self) -> list[Segment]:
        """What is reserved now and what is in it, by address."""
        return take_snapshot(self._heads.values())

    def _add_stream(self, stream: int) -> tuple[Pool, Pool]:
        pools = Pool(stream, True, self.options), Pool(stream, False, self.options)
        self._pools[stream] = pools
        return pools

    def _pools_of(self, small: bool) -> Iterator[Pool]:
        for stream in sorted(self._pools):
            yield self._pools[stream][not small]

    def _grow(self, pool: Pool, size: int, num_bytes: int) -> Block:
        """A new block from the driver, giving back cached memory if that is what it takes."""
        self._collect_garbage()
        block = self._reserve(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._reserve(pool, size)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._reserve(pool, size)
        if block is None:
            self.num_ooms += 1
            raise SimulatedOutOfMemory(
                requested_bytes=num_bytes,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                capacity_bytes=self.capacity_bytes or 0,
            )
        return block

    def _reserve(self, pool: Pool, size: int) -> Block | None:
        """A new segment, or more of an expandable one (`alloc_block`)."""
        segment_bytes = segment_bytes_for(size)
        if not self._device.allows(segment_bytes):
            return None
        if self.options.expandable_segments:
            return self._expandable.grow(pool, size)
        if not self._device.take(segment_bytes):
            return None
        block = Block(self.placement.place(segment_bytes), segment_bytes, pool)
        self._heads[block.address] = block
        return block

    def _release(self, block: Block) -> None:
        """Give back a segment that is one free block (`release_block`)."""
        assert block.is_whole_segment
        block.pool.remove(block)
        del self._heads[block.address]
        self._device.give_back(block.size)
        self.placement.release(block.address, block.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back unsplittable blocks, just enough for `size` (`release_available_cached_blocks`)."""
        max_split_bytes = self.options.max_split_size_bytes
        if max_split_bytes is None or self.options.expandable_segments:
            return False
        wanted_bytes = max(size, max_split_bytes)
        oversize = [block for block in pool.free_blocks() if block.size >= max_split_bytes]
        for block in oversize:
            if block.size >= wanted_bytes:
                self._release(block)
                return True
        released_bytes = 0
        while oversize and released_bytes < wanted_bytes:
            released_bytes += oversize[-1].size
            self._release(oversize.pop())
        return released_bytes >= wanted_bytes

    def _collect_garbage(self) -> None:
        """Give back segments unused for longer than average (`garbage_collect_cached_blocks`)."""
        threshold, capacity_bytes = self.options.garbage_collection_threshold, self.capacity_bytes
        if threshold is None or capacity_bytes is None or self._device.kind == "physical":
            return
        to_free = self.reserved_bytes - int(threshold * capacity_bytes)
        unsplit = [
            (pool.num_searches - block.born, block)
            for pool in self._pools_of(small=False)
            for block in pool.free_blocks()
            if block.is_whole_segment
        ]
        while to_free > 0 and unsplit:
            mean_age = sum(age for age, _ in unsplit) / len(unsplit)
            old = [block for age, block in unsplit if age >= mean_age]
            unsplit = [(age, block) for age, block in unsplit if age < mean_age]
            for block in old:
                to_free -= block.size
                self._release(block)
