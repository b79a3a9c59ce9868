"""Byte counts as people write them: `"11.17GiB"`, `"16 GB"`, `800MiB` → int, and back; other counts with their noun."""

import re
from decimal import Decimal
from numbers import Real
from operator import index
from typing import Any

from vramfit.errors import VramfitError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_ACCEPTED = (
    'write a size like "11.17GiB", "16 GB", "800MiB" or a plain number of bytes '
    "(KiB/MiB/GiB/TiB are powers of 1024, kB/MB/GB/TB of 1000)"
)
_SIZE = re.compile(r"(?P<number>[0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*(?P<unit>[a-zA-Z]*)")
MAX_BYTES = 2**63 - 1
MAX_SHOWN_CHARACTERS = 60
"""Of a value in a message."""


class SizeError(VramfitError, ValueError):
    """A text that is not a byte count."""

    exit_code = 2


def parse_bytes(size: str | int, *, name: str = "size") -> int:
    """Bytes from a size as a person writes it.

    Args:
        size: an `int`, or text with an optional unit. One-letter units are binary, as in nvidia-smi.
        name: what the size is called in an error message.

    Raises:
        SizeError: for anything that is not a positive size below 8 EiB; the hint shows what is accepted.

    >>> parse_bytes("11.17GiB"), parse_bytes("16 GB"), parse_bytes(512)
    (11993696174, 16000000000, 512)
    """
    size = plain(size)
    if isinstance(size, bool) or not isinstance(size, str | int):
        raise SizeError(f"{name} {shown(size)} is not a size", hint=_ACCEPTED)
    text = str(size).strip()
    match = _SIZE.fullmatch(text)
    unit = match["unit"].lower() if match else ""
    if match is None or unit not in _UNITS:
        raise SizeError(f"{name} {str(size)[:60]!r} is not a size", hint=_ACCEPTED)
    number = match["number"].replace("_", "").replace(",", "")
    if len(number) > 40:
        raise SizeError(f"{name} has {len(number)} digits", hint=_ACCEPTED)
    num_bytes = int(Decimal(number) * _UNITS[unit])
    if not 0 < num_bytes <= MAX_BYTES:
        raise SizeError(f"{name} {text!r} is not between 1 byte and 8 EiB", hint=_ACCEPTED)
    return num_bytes


def parse_memory(size: str | int, *, name: str = "memory") -> int:
    """Bytes of a memory to fit into; one that was written as a number so small that its unit was forgotten is refused.

    Raises:
        SizeError: as `parse_bytes`, and for digits alone that are less than 1 MiB.

    >>> parse_memory("8GiB")
    8589934592
    """
    num_bytes = parse_bytes(size, name=name)
    if num_bytes < MIB and isinstance(size, str) and size.strip().isdigit():
        hint = f"with a unit it is a size: {size.strip()}GiB"
        raise SizeError(f"{name} {size!r} is {num_bytes:,} bytes, in which nothing fits", hint=hint)
    return num_bytes


def format_bytes(num_bytes: int, *, digits: int = 2) -> str:
    """A byte count to read: in the largest binary unit that leaves at least one before the point.

    >>> format_bytes(11993696174), format_bytes(512), format_bytes(-3 * 2**20)
    ('11.17 GiB', '512 B', '-3.00 MiB')
    """
    size = abs(num_bytes)
    sign = "-" if num_bytes < 0 else ""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{sign}{size / factor:.{digits}f} {unit}"
    return f"{sign}{size} B"


def counted(count: float, noun: str) -> str:
    """A count with its noun, which takes an s for more than one.

    >>> counted(1, "epoch"), counted(2.5, "epoch"), counted(1200, "sample")
    ('1 epoch', '2.5 epochs', '1,200 samples')
    """
    shown = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{shown} {noun}" + ("" if count == 1 else "s")


def plain(value: Any) -> Any:
    """A number of any kind, such as numpy's, as Python's own; anything else as it is.

    >>> plain(8), plain(True), plain("8")
    (8, True, '8')
    """
    if isinstance(value, bool):
        return value
    try:
        return index(value)
    except (TypeError, ValueError):
        return float(value) if isinstance(value, Real) else value


def shown(value: object) -> str:
    """A value for a message: quoted, and not too long."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
