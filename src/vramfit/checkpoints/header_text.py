"""The JSON text of a safetensors header, walked tensor by tensor, each described field checked.

It is never parsed as a whole: hostile JSON (deep, or a million empty lists) costs no more memory than its length.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vramfit.checkpoints.entry import DTYPE_BITS
from vramfit.checkpoints.wording import DOWNLOAD_AGAIN, SAVE_AGAIN, bad_file, shown, sizes
from vramfit.errors import nearest_names

MAX_TENSORS = 100_000
MAX_METADATA = 10_000
"""Entries of the free-form part; what is published has some dozens."""
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 2**62

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\.)*+"')  # possessive: no memory for ways back
_FLAT_OBJECT = re.compile(r"\{[^{}]{0,4000}\}")
_FIELDS = {"dtype", "shape", "data_offsets"}


class Described(NamedTuple):
    """One tensor as the header describes it, offsets still counted from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def walk(path: Path, text: str) -> Iterator[Described]:
    """The tensors of a header, one after another, in its order."""
    if text[0] != "{":
        raise bad_file(path, "has a header that is no JSON object", DOWNLOAD_AGAIN)
    seen: set[str] = set()
    position = _skip(text, 1)
    while text[position : position + 1] != "}":
        if seen:
            position = _expect(path, text, position, ",")
        name, position = _string(path, text, position)
        position = _expect(path, text, position, ":")
        if name in seen:
            raise bad_file(path, f"names the tensor {shown(name)} twice", SAVE_AGAIN, tensor=name)
        if len(seen) >= MAX_TENSORS:
            raise bad_file(path, f"names more than {MAX_TENSORS:,} tensors", SAVE_AGAIN)
        seen.add(name)
        if name == "__metadata__":
            position = _skip_metadata(path, text, position)
            continue
        described, position = _tensor(path, text, position, name)
        yield described
    if text[position + 1 :].strip(" \t\r\n"):
        raise bad_file(path, "has a header with something after its closing brace", DOWNLOAD_AGAIN)


def _tensor(path: Path, text: str, position: int, name: str) -> tuple[Described, int]:
    match = _FLAT_OBJECT.match(text, position)
    if match is None:
        raise bad_file(path, f"describes tensor {shown(name)} by no plain JSON object", DOWNLOAD_AGAIN, tensor=name)
    try:
        fields = json.loads(match[0], object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120] or "nested too deeply"
        raise bad_file(
            path, f"describes tensor {shown(name)} by what is not JSON: {reason}", DOWNLOAD_AGAIN, tensor=name
        ) from None
    if fields.keys() != _FIELDS:
        odd = sorted(fields.keys() ^ _FIELDS)[0]
        said = "lacks" if odd in _FIELDS else "has an unknown"
        raise bad_file(path, f"{said} {shown(odd)} for tensor {shown(name)}", DOWNLOAD_AGAIN, tensor=name)
    dtype = _dtype(path, name, fields["dtype"])
    shape = _shape(path, name, fields["shape"])
    begin, end = _offsets(path, name, fields["data_offsets"])
    needed_bits = math.prod(shape) * DTYPE_BITS[dtype]
    if needed_bits != 8 * (end - begin):
        raise bad_file(
            path,
            f"gives tensor {shown(name)} {end - begin:,} bytes, but {dtype} {sizes(shape)} takes "
            f"{(needed_bits + 7) // 8:,}",
            DOWNLOAD_AGAIN,
            tensor=name,
        )
    return Described(name, dtype, shape, begin, end), _skip(text, match.end())


def _dtype(path: Path, name: str, dtype: Any) -> str:
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        near = ", ".join(nearest_names(str(dtype)[:20], DTYPE_BITS))
        raise bad_file(
            path,
            f"gives tensor {shown(name)} the dtype {shown(dtype)}, which is none of safetensors (nearest: {near})",
            SAVE_AGAIN,
            tensor=name,
        )
    return dtype


def _shape(path: Path, name: str, shape: Any) -> tuple[int, ...]:
    fits = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
    if not fits or not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in shape):
        raise bad_file(
            path,
            f"gives tensor {shown(name)} the shape {shown(shape)}, which no tensor has",
            DOWNLOAD_AGAIN,
            tensor=name,
        )
    if math.prod(shape) > MAX_ELEMENTS:
        raise bad_file(
            path,
            f"gives tensor {shown(name)} {sizes(tuple(shape))} elements, too many for any",
            DOWNLOAD_AGAIN,
            tensor=name,
        )
    return tuple(shape)


def _offsets(path: Path, name: str, offsets: Any) -> tuple[int, int]:
    plain = isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets)
    if not plain or not 0 <= offsets[0] <= offsets[1] <= MAX_ELEMENTS:
        raise bad_file(
            path,
            f"puts tensor {shown(name)} at data_offsets {shown(offsets)}, which are no begin and end",
            DOWNLOAD_AGAIN,
            tensor=name,
        )
    return offsets[0], offsets[1]


def _skip_metadata(path: Path, text: str, position: int) -> int:
    """Past the free-form part, an object of texts, without keeping any of it."""
    if text[position : position + 1] != "{":
        raise bad_file(path, "has a __metadata__ that is no object", SAVE_AGAIN, tensor="__metadata__")
    position = _skip(text, position + 1)
    num_entries = 0
    while text[position : position + 1] != "}":
        if num_entries:
            position = _expect(path, text, position, ",")
        num_entries += 1
        if num_entries > MAX_METADATA:
            raise bad_file(
                path, f"has a __metadata__ of more than {MAX_METADATA:,} entries", SAVE_AGAIN, tensor="__metadata__"
            )
        _, position = _string(path, text, position)
        position = _expect(path, text, position, ":")
        if text[position : position + 1] != '"':
            raise bad_file(path, "has a __metadata__ with values that are no texts", SAVE_AGAIN, tensor="__metadata__")
        _, position = _string(path, text, position)
    return _skip(text, position + 1)


def _string(path: Path, text: str, position: int) -> tuple[str, int]:
    match = _STRING.match(text, position)
    if match is None:
        raise bad_file(
            path, f"has a header that is not JSON: a quoted name is missing at character {position}", DOWNLOAD_AGAIN
        )
    try:
        value: str = json.loads(match[0])
        value.encode()  # a lone surrogate is no name that could be printed or compared
    except ValueError:
        raise bad_file(
            path, f"has a header that is not JSON: a broken character after {position}", DOWNLOAD_AGAIN
        ) from None
    return value, _skip(text, match.end())


def _expect(path: Path, text: str, position: int, mark: str) -> int:
    if text[position : position + 1] != mark:
        raise bad_file(
            path, f"has a header that is not JSON: {mark!r} is missing at character {position}", DOWNLOAD_AGAIN
        )
    return _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field is given twice")
    return fields


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
