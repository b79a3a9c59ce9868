"""The rows of a source: a number, fields by name, or what is wrong. Files of lines are read as a stream.

JSON documents (SQuAD's form too) and `datasets` folders are read whole.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any

from vramfit.errors import DataError, MissingExtra
from vramfit.runtime.data.source import STANDARD_INPUT, DataSource, Lines, open_lines
from vramfit.tasks import all_tasks
from vramfit.tasks.parts.reading import Row

DELIMITERS = ",;\t|"
LONGEST_FIELD = 2**30
TAGS = ("tokens", "tags")
"""Columns of a CoNLL file."""
NUM_ROWS = 1000
"""Rows that are looked at where a file may have no header."""
MAX_LABELS = 100
"""More different values than this are no labels for certain."""
SEPARATED = (".csv", ".tsv")
JSON_LINES = (".jsonl", ".ndjson")
KNOWN = ".csv, .tsv, .jsonl, .json, .txt, .conll, a folder saved by datasets, or - for standard input"


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
def open_table(source: DataSource) -> Iterator[Table]:
    """The rows of a source, as a stream.

    Raises:
        DataError: a file that is not there, is no text, or has an ending that says nothing.
        MissingExtra: a folder, without `datasets` to read it.
    """
    if source.path != STANDARD_INPUT and Path(source.path).is_dir():
        yield _saved_dataset(source)
        return
    with long_fields(), open_lines(source) as lines:
        yield _table(source, lines)


def _table(source: DataSource, lines: Lines) -> Table:
    suffix = Path(source.path).suffix.lower()
    if suffix in SEPARATED:
        return read_separated(_to_first_text(lines), lines, source)
    if suffix in JSON_LINES:
        return read_json_lines(lines, lines)
    if suffix == ".json":
        return _json_file(lines)
    if suffix == ".conll" or (source.kind.reads_conll and suffix not in (".txt", "")):
        return read_conll(lines, lines, needs_tags=source.needs_labels)
    if suffix == ".txt" or source.path == STANDARD_INPUT:
        return _plain(source, lines)
    raise DataError(
        f"{source.name}: the ending {suffix or '(none)'} does not say how to read it", file=source.name, hint=KNOWN
    )


def _plain(source: DataSource, lines: Lines) -> Table:
    """Tokens with tags, or a text a line; on standard input JSON lines and CSV too, by the first line not blank."""
    start = _to_first_text(lines)
    everything = chain(start, lines)
    first = start[-1] if start else ""
    if source.path == STANDARD_INPUT and first.lstrip().startswith("{"):
        return read_json_lines(everything, lines)
    if source.kind.reads_conll and (source.needs_labels or "\t" in first):
        return read_conll(everything, lines, needs_tags=source.needs_labels)
    if source.path == STANDARD_INPUT and (source.columns or _is_header(first)):
        return read_separated(start, lines, source)
    return read_text(everything, lines, blank_is_a_row=source.kind.reads_blank_lines)


def _is_header(line: str) -> bool:
    """Whether a line is of several names without blanks around them, one of which a column of texts has.

    >>> _is_header("text,label\\n"), _is_header("text\\n"), _is_header("Text, with a comma\\n")
    (True, False, False)
    """
    names = _fields(line.lower(), _delimiter(line))
    return len(names) > 1 and names == [n.strip() for n in names] and not _names_of_texts().isdisjoint(names)


def _to_first_text(lines: Lines) -> list[str]:
    """The first line that is not blank, behind the blank ones before it."""
    start: list[str] = []
    for line in lines:
        start.append(line)
        if line.strip():
            break
    return start


def _json_file(lines: Lines) -> Table:
    """A document, or JSON lines under another ending: then the first line is an object by itself."""
    start = _to_first_text(lines)
    second = next(lines, None)
    everything = chain(start, [] if second is None else [second], lines)
    if second is not None and _is_object(start[-1]):
        return read_json_lines(everything, lines)
    text = "".join(everything)
    if lines.broken:
        number, problem = next(iter(lines.broken.items()))
        raise DataError(f"{lines.name}, row {number}: {problem}", file=lines.name, rows=[number], hint="save as UTF-8")
    try:
        document = json.loads(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        row = getattr(error, "lineno", 1)
        raise DataError(
            f"{lines.name}, row {row}: not JSON: {error}", file=lines.name, rows=[row], hint="mend or rewrite the file"
        ) from None
    return _document(document, lines.name)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _document(document: Any, name: str) -> Table:
    entries = document.get("data", [document]) if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise DataError(f"{name} is JSON, but neither a list of objects nor SQuAD's form", file=name, hint=KNOWN)
    if any(isinstance(entry, dict) and "paragraphs" in entry for entry in entries):
        return Table(("id", "question", "context", "answers"), _numbered(_questions(entries)))
    columns = next((tuple(entry) for entry in entries if isinstance(entry, dict)), ())
    return Table(columns, _numbered(entries))


def _numbered(entries: Iterable[Any]) -> Iterator[Row]:
    for number, entry in enumerate(entries, 1):
        ok = isinstance(entry, dict)
        yield Row(number, entry) if ok else Row(number, {}, f"not a JSON object but {type(entry).__name__}")


def _questions(articles: list[Any]) -> Iterator[Any]:
    """SQuAD's nesting, flattened; what is not as it should be comes out as something that is no object."""
    for article in articles:
        for paragraph in article.get("paragraphs", [None]) if isinstance(article, dict) else [article]:
            if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
                yield None
                continue
            for question in paragraph["qas"]:
                if not isinstance(question, dict):
                    yield question
                    continue
                answers = [] if question.get("is_impossible") else question.get("answers")
                yield {**question, "context": paragraph.get("context"), "answers": answers}


def _saved_dataset(source: DataSource) -> Table:
    """A folder that `datasets` wrote with `save_to_disk`; numbers of classes become their names."""
    folder = Path(source.path)
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in folder.iterdir() if p.is_dir())
        raise DataError(
            f"{folder} holds several data sets: {', '.join(splits)}",
            file=str(folder),
            hint=f"name one of them, for example {folder / (splits[0] if splits else 'train')}",
        )
    if not (folder / "dataset_info.json").is_file():
        raise DataError(f"{folder} is a folder, and datasets did not save it", file=str(folder), hint=KNOWN)
    try:
        datasets: Any = import_module("datasets")
    except ImportError:
        raise MissingExtra("a folder saved by datasets", extra="datasets", package="datasets") from None
    data = datasets.load_from_disk(str(folder))
    names = {column: _class_names(data.features[column]) for column in data.column_names}

    def rows() -> Iterator[Row]:
        for number, record in enumerate(data, 1):
            yield Row(number, {column: _by_name(value, names[column]) for column, value in record.items()})

    return Table(tuple(data.column_names), rows())


def _class_names(feature: Any) -> list[str] | None:
    names: list[str] | None = getattr(getattr(feature, "feature", feature), "names", None)
    return names


def _by_name(value: Any, names: list[str] | None) -> Any:
    if names is None or value is None:
        return value
    if isinstance(value, list):
        return [_by_name(v, names) for v in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None


@contextmanager
def long_fields() -> Iterator[None]:
    """Inside, a field of a CSV file may be longer than the 128 KiB that Python allows; a text often is."""
    usual = csv.field_size_limit(LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(usual)


def read_separated(start: list[str], lines: Lines, source: DataSource) -> Table:
    """A CSV or TSV file, whose lines up to the header are read already.

    Commas, semicolons, tabs or bars separate the fields of a CSV file, whichever splits the header into most; quotes
    and line breaks inside them are honoured. A TSV file is taken literally: its quotes are text.
    """
    how: dict[str, Any] = {"delimiter": _delimiter("".join(start[-1:]))}
    if source.path.endswith(".tsv"):
        how = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    records = _records(csv.reader(chain(start, lines), strict=True, **how), lines)
    first = next(records, None)
    if first is None:
        return Table((), iter(()))
    wanted, columns = source.columns, tuple(name.strip() for name in first[1])
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
    named = _names_of_texts().union(*(task.label_columns for task in all_tasks()))
    if not rows or rows[0] is not records[0] or any(name.strip().lower() in named for name in rows[0]):
        return None
    columns = [[value.strip() for value in column] for column in zip(*rows, strict=True)]
    labels = [place for place, values in enumerate(columns) if _are_labels(values)]
    if len(labels) != 1:
        return None
    texts = columns[1 - labels[0]]
    if not any(character.isalpha() for character in "".join(texts)):  # numbers of rows, or other figures
        return None
    return Guess(text=str(2 - labels[0]), label=str(labels[0] + 1))


def _names_of_texts() -> set[str]:
    return {name for task in all_tasks() for names in task.text_names for name in names}


def _are_labels(values: Sequence[str]) -> bool:
    is_no_header = values[0] in values[1:] or all(value.removeprefix("-").isdecimal() for value in values)
    return is_no_header and len(set(values)) <= min(MAX_LABELS, len(values) // 2)


def _delimiter(header: str) -> str:
    return max(DELIMITERS, key=lambda d: len(_fields(header, d)))


def _fields(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return []


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
    return Table(tuple(kept[-1].fields) if kept else (), chain(kept, rows))


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
