"""Lines of a file or a pipe, and the rows they make: a number, fields by name, or what is wrong. Read as a stream."""

import csv
import json
import os
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from vramfit.errors import DataError
from vramfit.runtime.data.source import STANDARD_INPUT, DataSource
from vramfit.tasks import all_tasks
from vramfit.tasks.parts.reading import Row
from vramfit.units import format_bytes

MAX_LINE_BYTES = 256 * 2**20
"""A line this long is no row of a data set; reading on would only fill the memory."""
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
NOT_UTF8 = "not UTF-8"
"""How the problem of a line begins that cannot be decoded."""
DELIMITERS = ",;\t|"
LONGEST_FIELD = 2**30
TAGS = ("tokens", "tags")
"""Columns of a CoNLL file."""
NUM_ROWS = 1000
"""Rows that are looked at where a file may have no header."""
MAX_LABELS = 100
"""More different values than this are no labels for certain."""


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


@dataclass(frozen=True, slots=True)
class Guess:
    """Two columns by position, from 1."""

    text: str
    label: str

    def note(self, *, needs_labels: bool) -> str:
        """What is said of it."""
        if not needs_labels:
            return f"no header: column {self.text} is read as the text; --text-column names another"
        return (
            f"no header: column {self.text} is read as the text, column {self.label} as the label; "
            "--text-column and --label-column name others"
        )


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file and the columns they have."""

    columns: tuple[str, ...]
    rows: Iterator[Row]
    by_position: bool = False
    """Whether the columns are numbers because the file has no header."""
    guess: Guess | None = None
    """Which columns these are, where the file has no header and its values tell."""
    is_plain_text: bool = False
    """Whether it is a text a line: there is no other column to name."""


@contextmanager
def long_fields() -> Iterator[None]:
    """Inside, a field of a CSV file may be longer than the 128 KiB that Python allows; a text often is."""
    usual = csv.field_size_limit(LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(usual)


def read_separated(lines: Lines, source: DataSource) -> Table:
    """A CSV or TSV file.

    Commas, semicolons, tabs or bars separate the fields of a CSV file, whichever splits the header into most; quotes
    and line breaks inside them are honoured. A TSV file is taken literally: its quotes are text.
    """
    header = next(lines, "")
    literal = source.path.endswith(".tsv")
    delimiter = "\t" if literal else max(DELIMITERS, key=lambda d: _num_fields(header, d))
    everything = chain([header], lines)
    if literal:
        reader = csv.reader(everything, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=True)
    else:
        reader = csv.reader(everything, delimiter=delimiter, strict=True)
    records = _records(reader, lines)
    first = next(records, None)
    if first is None:
        return Table((), iter(()))
    wanted = [*source.text_columns, *([source.label_column] if source.label_column else [])]
    columns = tuple(name.strip() for name in first[1])
    seen, guess = [first], None
    if not wanted and len(columns) == 2 and source.kind.guesses_header:
        seen += islice(records, NUM_ROWS)
        guess = guess_columns([values for _, values, _ in seen])
    if guess is not None or (wanted and all(name.isdigit() and name not in columns for name in wanted)):
        positions = tuple(str(n) for n in range(1, len(columns) + 1))
        return Table(positions, _named(chain(seen, records), positions), by_position=True, guess=guess)
    if first[2]:
        return Table((), iter([Row(first[0], {}, first[2])]))
    return Table(columns, _named(chain(seen[1:], records), columns))


def guess_columns(records: Sequence[Sequence[str]]) -> Guess | None:
    """Text and label of the first rows of a file, its first line among them; None where that line may be a header.

    A column is of labels where there are few values and the first line's is one of them: it comes again, or all are
    numbers, which no header is. The text is the other column, where it is not of that kind too.

    >>> guess_columns([["a good film", "1"], ["a bad film", "0"], ["a fine film", "1"], ["a poor film", "0"]])
    Guess(text='1', label='2')
    >>> guess_columns([["review", "stars"], ["a bad film", "0"], ["a fine film", "1"], ["a poor film", "0"]])
    """
    rows = [row for row in records if len(row) == 2]
    if not rows or rows[0] is not records[0] or any(name.strip().lower() in _names_of_columns() for name in rows[0]):
        return None
    columns = [[value.strip() for value in column] for column in zip(*rows, strict=True)]
    labels = [place for place, values in enumerate(columns) if _are_labels(values)]
    if len(labels) != 1:
        return None
    texts = columns[1 - labels[0]]
    if not any(character.isalpha() for character in "".join(texts)):  # numbers of rows, or other figures
        return None
    return Guess(text=str(2 - labels[0]), label=str(labels[0] + 1))


def _names_of_columns() -> set[str]:
    """Names that a header may have: those of texts and labels, of any task."""
    texts = {name for task in all_tasks() for names in task.text_names for name in names}
    return texts.union(*(task.label_columns for task in all_tasks()))


def _are_labels(values: Sequence[str]) -> bool:
    different = len(set(values))
    is_no_header = values[0] in values[1:] or all(value.removeprefix("-").isdecimal() for value in values)
    return is_no_header and different <= min(MAX_LABELS, len(values) // 2)


def _num_fields(line: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=delimiter), []))
    except csv.Error:
        return 0


def _records(reader: Any, lines: Lines) -> Iterator[tuple[int, list[str], str]]:
    """Line, values and problem of each record; blank lines are no records."""
    while True:
        start = reader.line_num + 1
        values: list[str] = []
        problem = ""
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            unclosed = "unexpected end" in str(error)
            problem = "a quote that opens here is never closed" if unclosed else f"not CSV: {error}"
        problem = problem or lines.problem(start, reader.line_num)
        if values or problem:
            yield start, values, problem


def _named(records: Iterable[tuple[int, list[str], str]], columns: tuple[str, ...]) -> Iterator[Row]:
    for number, values, problem in records:
        if not problem and len(values) != len(columns):
            problem = f"{len(values)} fields, where the first row has {len(columns)}"
        yield Row(number, {}, problem) if problem else Row(number, dict(zip(columns, values, strict=True)))


def read_json_lines(lines: Iterable[str], numbered: Lines) -> Table:
    """A JSON object a line; the columns are those of the first."""
    rows = _objects(lines, numbered)
    kept: list[Row] = []
    for row in rows:
        kept.append(row)
        if not row.problem:
            break
    columns = tuple(kept[-1].fields) if kept else ()
    return Table(columns, chain(kept, rows))


def _objects(lines: Iterable[str], numbered: Lines) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        problem = numbered.problem(number, number)
        value: Any = None
        if not problem:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                problem = f"not JSON: {error}"
        if not problem and not isinstance(value, dict):
            problem = f"not a JSON object but {type(value).__name__}"
        yield Row(number, {}, problem) if problem else Row(number, value)


def read_text(lines: Iterable[str], numbered: Lines, *, blank_is_a_row: bool) -> Table:
    """A text a line. Blank lines between paragraphs are nothing to learn from, but a question left blank is a row."""

    def rows() -> Iterator[Row]:
        for number, line in enumerate(lines, 1):
            problem = numbered.problem(number, number)
            if problem:
                yield Row(number, {}, problem)
            elif blank_is_a_row or line.strip():
                yield Row(number, {"text": line.rstrip("\r\n")})

    return Table(("text",), rows(), is_plain_text=True)


def read_conll(lines: Iterable[str], numbered: Lines, *, needs_tags: bool) -> Table:
    """A token a line with its tag at the end, and a blank line between sentences."""

    def rows() -> Iterator[Row]:
        words: list[list[str]] = []
        first, last = 1, 0
        for last, line in enumerate(chain(lines, [""]), 1):
            if line.strip() and not line.startswith("-DOCSTART-"):
                first = first if words else last
                values = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
                words.append([value.strip() for value in values])
            elif words:
                yield _sentence(words, first, numbered.problem(first, last), needs_tags)
                words = []

    return Table(TAGS, rows())


def _sentence(words: list[list[str]], first: int, problem: str, needs_tags: bool) -> Row:
    bare = next((i for i, word in enumerate(words) if len(word) == 1 or not word[-1]), None)
    if not problem and needs_tags and bare is not None:
        problem = f"the token {words[bare][0]!r} in line {first + bare} has no tag"
    if problem:
        return Row(first, {}, problem)
    return Row(first, dict(zip(TAGS, ([w[0] for w in words], [w[-1] for w in words]), strict=True)))
