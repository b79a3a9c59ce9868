"""The tensors of a safetensors file, from its header; where the library refuses a file, what is wrong with it.

The format (safetensors 0.8, README and `tensor.rs`): 8 bytes with the header's length, little-endian; a JSON
object name → {dtype, shape, data_offsets}; then the data, tensor after tensor, without holes.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.checkpoints.files import DOWNLOAD_AGAIN, SAVE_AGAIN, bad_file, one_line, reason, shown, sizes
from vramfit.errors import CheckpointError, nearest_names

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_TENSORS = 100_000
MAX_MARKS = 20 * MAX_TENSORS
"""Quotes and commas in a header; a tensor has about 15. Bounds what parsing hostile JSON can cost."""
MAX_DIMENSIONS = 64
"""Of a tensor of torch."""

_FIELDS = {"dtype", "shape", "data_offsets"}
OTHER_FORMATS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the weights", "run `git lfs pull` in the repository"),
    (b"<", "a web page, not weights", "download it with `hf download`, or from the page's download link"),
    (b"\x89HDF", "an HDF5 file of TensorFlow, not weights of PyTorch", "download model.safetensors of the model"),
    (b"GGUF", "a GGUF file of llama.cpp, not weights of PyTorch", "download model.safetensors of the model"),
)
"""How files begin that are neither safetensors nor a pickle: the bytes, what it is, and what to do."""
_PICKLES = (
    (b"PK\x03\x04", "a zip file, as torch.save writes it, not safetensors", "rename it to pytorch_model.bin"),
    (b"\x80\x02", "a pickle, not safetensors", "rename it to pytorch_model.bin"),
)

_DTYPES = (
    "BOOL:8:bool F4:4: F6_E2M3:6: F6_E3M2:6: U8:8:uint8 I8:8:int8 F8_E5M2:8:float8_e5m2 F8_E4M3:8:float8_e4m3fn "
    "F8_E8M0:8:float8_e8m0fnu F8_E5M2FNUZ:8:float8_e5m2fnuz F8_E4M3FNUZ:8:float8_e4m3fnuz I16:16:int16 "
    "U16:16:uint16 F16:16:float16 BF16:16:bfloat16 I32:32:int32 U32:32:uint32 F32:32:float32 C64:64:complex64 "
    "F64:64:float64 I64:64:int64 U64:64:uint64"
)
"""Name in safetensors, bits an element takes (safetensors 0.8, `tensor.rs`), attribute of torch where it has one."""
_ROWS = [word.split(":") for word in _DTYPES.split()]
DTYPE_BITS: Mapping[str, int] = {name: int(bits) for name, bits, _ in _ROWS}
TORCH_DTYPES: Mapping[str, str] = {name: attribute for name, _, attribute in _ROWS if attribute}
FLOATS = frozenset(name for name in DTYPE_BITS if name.startswith(("F", "BF")))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint; nothing of it has been read."""

    name: str
    """As the checkpoint calls it."""
    dtype: str
    """A key of `DTYPE_BITS`, for `.bin` files too."""
    shape: tuple[int, ...]
    """Sizes; empty for a scalar."""
    file: Path
    """The file that holds it."""

    @property
    def num_elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """What it takes in its own dtype."""
        return (self.num_elements * DTYPE_BITS[self.dtype] + 7) // 8


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """The tensors of one safetensors file, in the order of their bytes; reads nothing but the header.

    Raises:
        CheckpointError: the file is damaged or is something else; names file, tensor and what is wrong.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(40), size)
            file.seek(8)
            raw = file.read(length)
        if raw.count(b'"') + raw.count(b",") > MAX_MARKS:
            raise bad_file(
                path, f"has a header with more quotes and commas than {MAX_TENSORS:,} tensors need", SAVE_AGAIN
            )
        with safe_open(path, framework="numpy") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            entries = tuple(
                TensorEntry(name=name, dtype=part.get_dtype(), shape=tuple(part.get_shape()), file=path)
                for name, part in slices
            )
    except SafetensorError as error:
        fault = diagnose(path, raw, size - 8 - length)
        raise fault or bad_file(path, f"is damaged: {one_line(error)}", DOWNLOAD_AGAIN) from None
    except OSError as error:
        raise bad_file(path, f"cannot be read: {reason(error)}", "check its permissions") from None
    if len(entries) > MAX_TENSORS:
        raise bad_file(path, f"names more than {MAX_TENSORS:,} tensors", SAVE_AGAIN)
    if raw.count(b'"data_offsets"') != len(entries):  # the library takes the last of two tensors of one name
        fault = diagnose(path, raw, size - 8 - length)
        if fault is not None:
            raise fault
    return entries


def _header_length(path: Path, head: bytes, size: int) -> int:
    if size == 0:
        raise bad_file(path, "is empty (0 bytes)", DOWNLOAD_AGAIN)
    for magic, what, fix in (*OTHER_FORMATS, *_PICKLES):
        if head.startswith(magic) and head[8:9] != b"{":
            raise bad_file(path, f"is {what}", fix)
    if size < 8:
        raise bad_file(
            path, f"is {size} bytes; a safetensors file begins with 8 that give its header's length", DOWNLOAD_AGAIN
        )
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise bad_file(
            path,
            f"says its header is {length:,} bytes; the format allows {MAX_HEADER_BYTES:,}: no safetensors",
            DOWNLOAD_AGAIN,
        )
    if length > size - 8:
        raise bad_file(
            path, f"says its header is {length:,} bytes, but only {size - 8:,} follow: it is cut off", DOWNLOAD_AGAIN
        )
    if length < 2:
        raise bad_file(path, f"says its header is {length} bytes, too short for any", DOWNLOAD_AGAIN)
    return length


class _Twice(ValueError):
    """One name for two members of a JSON object."""


def diagnose(path: Path, raw: bytes, num_data_bytes: int) -> CheckpointError | None:
    """What is wrong with a header that the library refuses, with the tensor at fault; None where all looks sound."""
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_without_doubles)
    except _Twice as error:
        return bad_file(path, f"names the tensor {shown(str(error))} twice", SAVE_AGAIN, tensor=str(error))
    except UnicodeDecodeError as error:
        return bad_file(path, f"has a header that is not UTF-8 (byte {8 + error.start})", DOWNLOAD_AGAIN)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        return bad_file(path, f"has a header that is not JSON: {why}", DOWNLOAD_AGAIN)
    if not isinstance(header, dict):
        return bad_file(path, "has a header that is no JSON object", DOWNLOAD_AGAIN)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        return bad_file(path, "has a __metadata__ that is no object of texts", SAVE_AGAIN, tensor="__metadata__")
    for name, fields in header.items():
        what = _fault(fields)
        if what:
            return bad_file(path, f"describes tensor {shown(name)} wrongly: {what}", DOWNLOAD_AGAIN, tensor=name)
    return _layout_fault(path, header, num_data_bytes)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        name.encode()  # a lone surrogate is no name that could be printed or compared
        if name in fields:
            raise _Twice(name)
        fields[name] = value
    return fields


def _fault(fields: Any) -> str:
    """What is wrong with the description of one tensor; nothing where it is sound."""
    if not isinstance(fields, dict):
        return f"{shown(fields)} is no JSON object"
    lost = sorted(_FIELDS - fields.keys())
    if lost:
        return f"it lacks {lost[0]}"
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        near = ", ".join(nearest_names(str(dtype)[:20], DTYPE_BITS))
        return f"the dtype {shown(dtype)} is none of safetensors (nearest: {near})"
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        return f"the shape {shown(shape)} is one which no tensor has"
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"the data_offsets {shown(offsets)} are no begin and end"
    needed_bits, num_bytes = math.prod(shape) * DTYPE_BITS[dtype], offsets[1] - offsets[0]
    if needed_bits != 8 * num_bytes:
        needed = f"{(needed_bits + 7) // 8:,}" if needed_bits < 2**64 else "more than any file holds"
        return f"it has {num_bytes:,} bytes, but {dtype} {shown(sizes(shape))} takes {needed}"
    return ""


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**64 for n in values)


def _layout_fault(path: Path, header: dict[str, Any], num_data_bytes: int) -> CheckpointError | None:
    """The tensors must lie one after another and fill the data exactly."""
    position, before = 0, ""
    for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = fields["data_offsets"]
        if begin < position:
            what = f"puts tensor {shown(name)} over {shown(before)}: their bytes overlap"
            return bad_file(path, what, SAVE_AGAIN, tensor=name)
        if begin > position:
            what = f"leaves a hole of {begin - position:,} bytes before tensor {shown(name)}"
            return bad_file(path, what, SAVE_AGAIN, tensor=name)
        if end > num_data_bytes:
            what = f"is cut off: it holds {num_data_bytes:,} bytes of data, but tensor {shown(name)} ends at {end:,}"
            return bad_file(path, what, DOWNLOAD_AGAIN, tensor=name)
        position, before = end, name
    if position < num_data_bytes:
        what = f"has {num_data_bytes - position:,} bytes after its last tensor that belong to none"
        return bad_file(path, what, DOWNLOAD_AGAIN)
    return None
