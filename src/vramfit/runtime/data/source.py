"""`DataSource`: which file is read, for which task, and which of its columns; and the lines of that file."""

import os
import shlex
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from vramfit.errors import DataError, WorkloadError
from vramfit.tasks import DEFAULT, Task, find_task, task_names, trained_tasks
from vramfit.units import format_bytes

STANDARD_INPUT = "-"
MAX_LINE_BYTES = 256 * 2**20
"""A line this long is no row of a data set; reading on would only fill the memory."""
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
NOT_UTF8 = "not UTF-8"
"""How the problem of a line begins that cannot be decoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """A data set as the user names it.

    >>> DataSource(path="train.csv").name
    'train.csv'

    Raises:
        WorkloadError: a task without data of its own, too many columns for it, or no rows asked for.
    """

    path: str
    """`.csv`, `.tsv`, `.jsonl`, `.json` (SQuAD's form too), `.txt`, `.conll`, a folder that `datasets` saved, or `-`
    for standard input: JSON lines, CSV with a header or where a column is named, or plain text."""
    task: str = DEFAULT
    """One that is trained."""
    text_columns: tuple[str, ...] = ()
    """One column, or two for pairs of texts; guessed from the names where empty. In a file without a header, positions
    from 1."""
    label_column: str | None = None
    """Guessed from the names where None."""
    needs_labels: bool = True
    """False for prediction: labels are not looked for."""
    skip_bad_rows: bool = False
    """Keep bad rows out and report them, where otherwise they are an error."""
    max_rows: int | None = None
    """Read no more rows than this."""
    loss: str | None = None
    """What is to learn from it, where that tells what its rows mean; None where nothing was chosen."""
    problem: str | None = None
    """What a head is to learn from it, of a task whose head may learn several things; None has the data decide."""
    of_model: bool = False
    """Whether the task is a trained model's: errors then name no other one."""

    def __post_init__(self) -> None:
        problems = []
        if self.task not in trained_tasks():
            kind = "has no data set to read" if self.task in task_names() else "is no task"
            problems.append(f"task {self.task!r} {kind}; those that do: {', '.join(trained_tasks())}")
        elif self.text_columns:
            least, most = self.kind.num_texts
            if not least <= len(self.text_columns) <= most:
                between = "or" if most == least + 1 else "to"
                wanted = f"{least}" if least == most else f"{least} {between} {most}"
                problems.append(f"{self.task} reads {wanted} columns of text, not {len(self.text_columns)}")
        if self.max_rows is not None and self.max_rows < 1:
            problems.append(f"max_rows {self.max_rows} is not a whole number from 1")
        if problems:
            raise WorkloadError(problems)

    @property
    def kind(self) -> Task:
        """Its task."""
        return find_task(self.task)

    @property
    def columns(self) -> tuple[str, ...]:
        """Those that are named, of texts and of the label."""
        return (*self.text_columns, *([self.label_column] if self.label_column else []))

    @property
    def name(self) -> str:
        """For messages."""
        return "standard input" if self.path == STANDARD_INPUT else self.path


def without_labels(path: str, task: str, text_columns: tuple[str, ...] = (), max_rows: int | None = None) -> DataSource:
    """A data set of which only the lengths are wanted; of a task that none is read for, texts or pairs of them."""
    settings: dict[str, Any] = {"needs_labels": False, "skip_bad_rows": True, "max_rows": max_rows}
    read_for = task if task in trained_tasks() else DEFAULT
    return DataSource(path=path, task=read_for, text_columns=text_columns, **settings)


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
