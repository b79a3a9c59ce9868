"""Sizes the caching allocator works in, and how a request becomes a block and a segment."""

from typing import Literal

from vramfit.units import GIB, MIB

CapacityKind = Literal["allowed", "physical"]
"""Who refuses: PyTorch, by `set_per_process_memory_fraction` ("allowed"), or the driver ("physical")."""


class DeviceMemory:
    """Bytes reserved of a capacity, and their peak."""

    __slots__ = ("capacity_bytes", "kind", "peak_reserved_bytes", "reserved_bytes")

    def __init__(self, capacity_bytes: int | None, kind: CapacityKind) -> None:
        self.capacity_bytes = capacity_bytes
        self.kind = kind
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0

    def allows(self, size: int) -> bool:
        """Whether PyTorch goes to the driver at all for `size` bytes."""
        return self.kind == "physical" or self._has_room(size)

    def take(self, size: int) -> bool:
        """Reserve `size` bytes, unless the driver has not got them."""
        if self.kind == "physical" and not self._has_room(size):
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def give_back(self, size: int) -> None:
        self.reserved_bytes -= size

    def _has_room(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + size <= self.capacity_bytes


# c10/core/AllocatorConfig.h, torch 2.13 (in c10/cuda/CUDACachingAllocator.cpp up to 2.9, same values).
MIN_BLOCK_BYTES = 512  # kMinBlockSize: every block is a multiple of it
SMALL_REQUEST_BYTES = MIB  # kSmallSize: the largest request that goes to the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: a segment of the small pool
MIN_LARGE_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer: shared by requests of 1 to 10 MiB
SEGMENT_STEP_BYTES = 2 * MIB  # kRoundLarge: larger segments are rounded up to it

# c10/core/AllocatorConfig.cpp: kRoundUpPowerOfTwoIntervals, one per power of two from 1 MiB (Start) on.
NUM_ROUNDUP_INTERVALS = 16
_FIRST_ROUNDUP_LOG2 = MIB.bit_length() - 1
assert MIB << NUM_ROUNDUP_INTERVALS == 64 * GIB  # kRoundUpPowerOfTwoEnd


def round_request(num_bytes: int, divisions: tuple[int, ...] = ()) -> int:
    """The block a request needs: `round_size` of the allocator.

    Args:
        num_bytes: what was asked for.
        divisions: `roundup_power2_divisions`, one number for each power of two from 1 MiB to 32 GiB.

    >>> round_request(1), round_request(513), round_request(5 * 2**20 + 1, (4,) * 16) // 2**20
    (512, 1024, 6)
    """
    if num_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    if divisions:
        interval = num_bytes.bit_length() - 1 - _FIRST_ROUNDUP_LOG2
        num_divisions = divisions[min(max(interval, 0), NUM_ROUNDUP_INTERVALS - 1)]
        if num_divisions > 1 and num_bytes > MIN_BLOCK_BYTES * num_divisions:
            return _round_to_division(num_bytes, num_divisions)
    return (num_bytes + MIN_BLOCK_BYTES - 1) // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES


def segment_bytes_for(block_bytes: int) -> int:
    """The segment asked of cudaMalloc when no cached block fits: `get_allocation_size`.

    >>> [segment_bytes_for(size * 2**20) // 2**20 for size in (1, 2, 10, 11)]
    [2, 20, 10, 12]
    """
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_LARGE_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return (block_bytes + SEGMENT_STEP_BYTES - 1) // SEGMENT_STEP_BYTES * SEGMENT_STEP_BYTES


def _round_to_division(num_bytes: int, num_divisions: int) -> int:
    """Up to the next of `num_divisions` equal steps between two powers of two."""
    floor = 1 << (num_bytes.bit_length() - 1)
    step = floor >> (num_divisions.bit_length() - 1)
    return (num_bytes + step - 1) // step * step
