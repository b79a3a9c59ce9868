"""`AllocatorOptions`: what PYTORCH_ALLOC_CONF can change about the simulated allocator."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vramfit.allocator.rules import LARGE_SEGMENT_BYTES, NUM_ROUNDUP_INTERVALS
from vramfit.errors import VramfitError
from vramfit.units import MIB

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
