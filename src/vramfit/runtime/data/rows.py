"""Rows of a file, whatever its form: a number, fields by name, or what is wrong with it. Read as a stream."""

import csv
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from vramfit.runtime.data.headless import NUM_ROWS, Guess, guess_columns
from vramfit.runtime.data.lines import Lines
from vramfit.runtime.data.source import DataSource

DELIMITERS = ",;\t|"
LONGEST_FIELD = 2**30
TAGS = ("tokens", "tags")
"""Columns of a CoNLL file."""


class Row(NamedTuple):
    """One row as it stands in the file."""

    number: int
    """The line it begins on, from 1; in a JSON document or a `datasets` folder, which one it is."""
    fields: dict[str, Any]
    problem: str = ""
    """What is wrong with it; the fields are then empty."""


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file and the columns they have."""

    columns: tuple[str, ...]
    rows: Iterator[Row]
    by_position: bool = False
    """Whether the columns are numbers because the file has no header."""
    guess: Guess | None = None
    """Which columns these are, where the file has no header and its values tell."""


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
    if not wanted and len(columns) == 2 and source.task == "sequence-classification":
        seen += islice(records, NUM_ROWS)
        guess = guess_columns([values for _, values, _ in seen])
    if guess is not None or (wanted and all(name.isdigit() and name not in columns for name in wanted)):
        positions = tuple(str(n) for n in range(1, len(columns) + 1))
        return Table(positions, _named(chain(seen, records), positions), by_position=True, guess=guess)
    if first[2]:
        return Table((), iter([Row(first[0], {}, first[2])]))
    return Table(columns, _named(chain(seen[1:], records), columns))


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

    return Table(("text",), rows())


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
