"""`TensorEntry`: one tensor of a checkpoint as its header tells of it, and what the dtypes are called."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits an element takes, by the name safetensors gives the dtype (safetensors 0.8, `tensor.rs`)."""

TORCH_DTYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""Attribute of `torch` by safetensors name; dtypes that torch has no tensor for are not here."""

FLOATS = frozenset(name for name in DTYPE_BITS if name.startswith(("F", "BF")))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor: where its bytes lie and how to read them; nothing of it has been read."""

    name: str
    """As the checkpoint calls it."""
    dtype: str
    """A key of `DTYPE_BITS`, for `.bin` files too."""
    shape: tuple[int, ...]
    """Sizes; empty for a scalar."""
    begin: int
    """First byte in the file, counted from its start."""
    end: int
    """The byte after the last."""
    file: Path
    """The file that holds it."""
    stride: tuple[int, ...] | None = None
    """Elements between neighbours in each dimension; None for row-major, which safetensors always is."""

    @property
    def num_elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """What it takes in its own dtype."""
        return (self.num_elements * DTYPE_BITS[self.dtype] + 7) // 8
