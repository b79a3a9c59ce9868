"""Which form a source has, and the forms that are read whole: JSON documents (SQuAD's) and `datasets` folders."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from vramfit.errors import DataError, MissingExtra
from vramfit.runtime.data.rows import (
    Lines,
    Table,
    long_fields,
    open_lines,
    read_conll,
    read_json_lines,
    read_separated,
    read_text,
)
from vramfit.runtime.data.source import STANDARD_INPUT, DataSource
from vramfit.tasks.parts.reading import Row

SEPARATED = (".csv", ".tsv")
JSON_LINES = (".jsonl", ".ndjson")
KNOWN = ".csv, .tsv, .jsonl, .json, .txt, .conll, a folder saved by datasets, or - for standard input"


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
        return read_separated(lines, source)
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
    """JSON lines on standard input, tokens with tags, or a text a line: the first line that is not blank tells."""
    start: list[str] = []
    for line in lines:
        start.append(line)
        if line.strip():
            break
    everything = chain(start, lines)
    first = start[-1] if start else ""
    if source.path == STANDARD_INPUT and first.lstrip().startswith("{"):
        return read_json_lines(everything, lines)
    if source.kind.reads_conll and (source.needs_labels or "\t" in first):
        return read_conll(everything, lines, needs_tags=source.needs_labels)
    return read_text(everything, lines, blank_is_a_row=source.kind.reads_blank_lines)


def _json_file(lines: Lines) -> Table:
    """A document, or JSON lines under another ending: then the first line is an object by itself."""
    start: list[str] = []
    for line in lines:
        start.append(line)
        if line.strip():
            break
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
    inner = getattr(feature, "feature", feature)
    names: list[str] | None = getattr(inner, "names", None)
    return names


def _by_name(value: Any, names: list[str] | None) -> Any:
    if names is None or value is None:
        return value
    if isinstance(value, list):
        return [_by_name(v, names) for v in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None
