"""Sizes the caching allocator works in, and `AllocatorOptions`: what PYTORCH_ALLOC_CONF can change about it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vramfit.errors import VramfitError
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


# Settings of page-locked host memory, locking or graph capture: nothing here depends on them.
_WITHOUT_EFFECT = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "release_lock_on_cudamalloc",
        "pinned_use_cuda_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_free_catch_all",
    }
)
_SETTING = re.compile(r"(?P<key>[A-Za-z0-9_]+):(?P<value>\[[^\]]*\]|[^,\[\]]+)(?:,|$)")


class AllocatorOptionError(VramfitError, ValueError):
    """An allocator setting that is not simulated, or whose value PyTorch would refuse."""

    exit_code = 2

    def __init__(self, message: str, *, option: str) -> None:
        self.option = option
        super().__init__(message, hint=f"simulated are {', '.join(sorted(_READERS))} and backend:native")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorOptions:
    """Settings of the caching allocator; the defaults are PyTorch's."""

    expandable_segments: bool = False
    """One growing segment a pool instead of one cudaMalloc a segment."""
    max_split_size_bytes: int | None = None
    """Blocks of at least this size are never split, and serve only requests of at least this size."""
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """How much larger than such a request an unsplit block may be."""
    roundup_power2_divisions: tuple[int, ...] = ()
    """Steps between powers of two that requests are rounded to, for each from 1 MiB to 32 GiB; or empty."""
    garbage_collection_threshold: float | None = None
    """Share of the capacity above which old cached segments are freed before a new one is made."""

    def __post_init__(self) -> None:
        if self.max_split_size_bytes is not None and self.max_split_size_bytes < LARGE_SEGMENT_BYTES:
            raise AllocatorOptionError("max_split_size_mb is at least 20", option="max_split_size_mb")
        if self.max_non_split_rounding_bytes < LARGE_SEGMENT_BYTES:
            raise AllocatorOptionError("max_non_split_rounding_mb is at least 20", option="max_non_split_rounding_mb")
        if self.garbage_collection_threshold is not None and not 0 < self.garbage_collection_threshold < 1:
            raise AllocatorOptionError(
                f"garbage_collection_threshold {self.garbage_collection_threshold} is not between 0 and 1",
                option="garbage_collection_threshold",
            )
        _check_divisions(self.roundup_power2_divisions)

    @classmethod
    def parse(cls, text: str) -> "AllocatorOptions":
        """Options from the text of PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF.

        Raises:
            AllocatorOptionError: an option that is not simulated, by its name, or a value out of range.

        >>> AllocatorOptions.parse("expandable_segments:True, max_split_size_mb:128").max_split_size_bytes
        134217728
        """
        values: dict[str, Any] = {}
        compact = re.sub(r"\s", "", text)
        position = 0
        while position < len(compact):
            setting = _SETTING.match(compact, position)
            if setting is None:
                raise AllocatorOptionError(
                    f"{compact[position:][:60]!r} is not of the form option:value", option=compact[position:]
                )
            values |= _read_setting(setting["key"], setting["value"])
            position = setting.end()
        return cls(**values)


def _read_setting(key: str, value: str) -> dict[str, Any]:
    if key in _WITHOUT_EFFECT or (key == "backend" and value == "native"):
        return {}
    if key not in _READERS:
        raise AllocatorOptionError(f"the allocator option {key}:{value} is not simulated", option=key)
    field, read = _READERS[key]
    try:
        return {field: read(value)}
    except (ValueError, OverflowError):
        raise AllocatorOptionError(f"{value!r} is not a value of {key}", option=key) from None


def _read_bool(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(value)
    return value == "True"


def _read_mib(value: str) -> int:
    return int(value) * MIB


def _read_divisions(value: str) -> tuple[int, ...]:
    """`4`, or `[256:1,512:2,>:4]`: divisions up to each interval (in MiB), `>` for all above.

    As `parseRoundUpPower2Divisions` of c10/core/AllocatorConfig.cpp: intervals between two that are named
    keep no division.
    """
    if not value.startswith("["):
        return (int(value),) * NUM_ROUNDUP_INTERVALS
    divisions = [0] * NUM_ROUNDUP_INTERVALS
    last = 0
    for number, pair in enumerate(value.strip("[]").split(",")):
        interval, _, count = pair.partition(":")
        if interval == ">":
            divisions[last:] = [int(count)] * (NUM_ROUNDUP_INTERVALS - last)
            continue
        last = min(_log2(int(interval)), NUM_ROUNDUP_INTERVALS - 1)
        if number == 0:
            divisions[:last] = [int(count)] * last
        divisions[last] = int(count)
    return tuple(divisions)


def _log2(value: int) -> int:
    if value < 1 or value & (value - 1):
        raise ValueError(value)
    return value.bit_length() - 1


def _check_divisions(divisions: tuple[int, ...]) -> None:
    if len(divisions) not in (0, NUM_ROUNDUP_INTERVALS) or any(d < 0 or d & (d - 1) for d in divisions):
        raise AllocatorOptionError(
            f"roundup_power2_divisions are {NUM_ROUNDUP_INTERVALS} powers of two or zeros, not {divisions}",
            option="roundup_power2_divisions",
        )


_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable_segments", _read_bool),
    "max_split_size_mb": ("max_split_size_bytes", _read_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
}
