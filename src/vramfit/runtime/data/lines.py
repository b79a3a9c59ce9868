"""Lines of a file or a pipe, decoded one at a time; those that are not UTF-8 are remembered with their place."""

import os
import shlex
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from vramfit.errors import DataError
from vramfit.runtime.data.source import STANDARD_INPUT, DataSource
from vramfit.units import format_bytes

MAX_LINE_BYTES = 256 * 2**20
"""A line this long is no row of a data set; reading on would only fill the memory."""
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
NOT_UTF8 = "not UTF-8"
"""How the problem of a line begins that cannot be decoded."""


class Lines:
    """Iterates over decoded lines, each with its line end; counts them."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self.name = name
        self.number = 0
        """Of the line given last, from 1."""
        self.broken: dict[int, str] = {}
        """Line number → what is wrong with it. Such a line is given all the same, with marks in place of the bytes, so
        that rows of several lines stay in step."""
        self._stream = stream
        self._offset = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        raw = self._stream.readline(MAX_LINE_BYTES + 1)
        if not raw:
            raise StopIteration
        self.number += 1
        if self.number == 1:
            self._check_start(raw)
        if len(raw) > MAX_LINE_BYTES:
            raise self._too_long(raw)
        text = self._decode(raw)
        self._offset += len(raw)
        return text.removeprefix("\ufeff") if self.number == 1 else text

    def problem(self, first: int, last: int) -> str:
        """What is wrong with the lines from first to last; empty when nothing is."""
        if not self.broken:
            return ""
        return next((self.broken[n] for n in range(first, last + 1) if n in self.broken), "")

    def _decode(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            where = self._offset + error.start
            self.broken[self.number] = f"{NOT_UTF8}: byte 0x{raw[error.start]:02x} at offset {where:,} of the file"
            return raw.decode("utf-8", errors="replace")

    def _check_start(self, raw: bytes) -> None:
        if raw.startswith(UTF16_MARKS):
            raise self._not_text("it begins as UTF-16 does")
        if b"\0" in raw[:4096]:
            raise self._not_text(f"there is a zero byte at offset {raw.index(0)}, in row 1")

    def _too_long(self, raw: bytes) -> DataError:
        num_bytes = len(raw)
        while _is_file(self._stream) and raw and not raw.endswith(b"\n"):
            raw = self._stream.readline(MAX_LINE_BYTES)
            num_bytes += len(raw)
        size = f"has {format_bytes(num_bytes)}" if _is_file(self._stream) else "does not end"
        return DataError(
            f"{self.name}: line {self.number:,} {size}, and at most {format_bytes(MAX_LINE_BYTES)} are read of a line",
            file=self.name,
            rows=[self.number],
            hint="write one sample a line; a JSON document as JSON lines (.jsonl)",
        )

    def _not_text(self, why: str) -> DataError:
        return DataError(
            f"{self.name} is not UTF-8 text: {why}",
            file=self.name,
            rows=[self.number],
            hint=as_utf8(self.name, "UTF-16"),
        )


def _is_file(stream: IO[bytes]) -> bool:
    """Whether a stream has an end for certain."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except OSError:
        return False


def as_utf8(name: str, encoding: str) -> str:
    """The hint for a file in another encoding."""
    path = Path(name)
    command = shlex.join(["iconv", "-f", encoding, "-t", "UTF-8", name])
    return f"save it as UTF-8, for example: {command} > {shlex.quote(f'{path.stem}-utf8{path.suffix}')}"


@contextmanager
def open_lines(source: DataSource) -> Iterator[Lines]:
    """The lines of a source's file, or of standard input.

    Raises:
        DataError: no such file, or one that cannot be read.
    """
    if source.path == STANDARD_INPUT:
        yield Lines(sys.stdin.buffer, source.name)
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(source.path).open("rb"))
        except OSError as error:
            raise DataError(
                f"cannot read {source.path}: {error.strerror}", file=source.path, hint="name a file that is there"
            ) from None
        yield Lines(file, source.name)
