"""`Collection`: queries, documents and which of these are relevant, from three files; checked before a model is loaded.

Files of BEIR are read as they are: `queries.jsonl`, `corpus.jsonl` and `qrels/test.tsv`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from vramfit.errors import DataError
from vramfit.runtime.data.examples import BadRow, refuse, shown_columns
from vramfit.runtime.data.rows import Table, open_table
from vramfit.runtime.data.source import DataSource
from vramfit.tasks.parts.reading import BadValue, Reference, Row, text_in
from vramfit.units import shown

IDS = ("_id", "id", "query-id", "query_id", "qid", "corpus-id", "corpus_id", "document_id", "doc_id", "docid", "pid")
TEXTS = ("text", "query", "question", "document", "passage", "content", "body", "sentence")
TITLE = "title"
"""What documents may have beside their text; it comes before it, as BEIR has it."""
OF_QUERY = ("query-id", "query_id", "qid", "query")
OF_DOCUMENT = ("corpus-id", "corpus_id", "document-id", "document_id", "doc_id", "docid", "pid", "document")
GRADES = ("score", "grade", "relevance", "rel", "label")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionFiles:
    """The three files, as the user names them."""

    queries: str
    documents: str
    relevant: str
    task: str
    """Of the model."""
    skip_bad_rows: bool = False
    """Keep bad rows out and report them, where otherwise they are an error."""

    def source(self, path: str) -> DataSource:
        """One of the files."""
        return DataSource(path=path, task=self.task, needs_labels=False)


@dataclass(frozen=True, slots=True)
class Collection:
    """What was read."""

    queries: list[Reference]
    documents: list[Reference]
    relevant: list[tuple[int, int, float]]
    """Numbers of a query and of a document, and the grade, above 0; every query has one."""
    bad_rows: tuple[BadRow, ...]


class _Reader:
    """Rows of one file after another; bad ones are kept or refused."""

    def __init__(self, files: CollectionFiles) -> None:
        self._files = files
        self.bad: list[BadRow] = []

    def each(self, path: str, begin: Callable[[DataSource, Table], Callable[[Row], None]]) -> None:
        """Hand every row of a file to what `begin` gives for its columns."""
        source, bad, num_rows = self._files.source(path), [], 0
        with open_table(source) as table:
            if not table.columns:
                raise _empty(source)
            take = begin(source, table)
            for row in table.rows:
                try:
                    if row.problem:
                        raise BadValue(row.problem)
                    take(row)
                except BadValue as error:
                    bad.append(BadRow(source.name, row.number, str(error), error.hint, num_rows))
                num_rows += 1
        if not num_rows:
            raise _empty(source)
        self.keep_out(bad, num_rows)

    def keep_out(self, bad: list[BadRow], num_rows: int) -> None:
        """Raises DataError for bad rows, unless they may be skipped."""
        if bad and (not self._files.skip_bad_rows or len(bad) == num_rows):
            raise refuse(bad, num_rows)
        self.bad += bad


def read_collection(files: CollectionFiles) -> Collection:
    """Reads and checks the three files.

    Raises:
        DataError: a file or a column that is not there; or rows that cannot be used: an id that comes twice or does not
            exist, a text that is empty, a grade that is no number, a query without a relevant document.
    """
    reader = _Reader(files)
    queries, documents = _texts(reader, files.queries), _texts(reader, files.documents)
    relevant = _relevant(reader, files, queries, documents)
    answered = {query for query, _, _ in relevant}
    silent = [q for number, q in enumerate(queries.values()) if number not in answered]
    bad = [BadRow(files.queries, q["row"], f"no relevant document for query {shown(q['id'])}") for q in silent]
    reader.keep_out(bad, len(queries))
    kept = {number: place for place, number in enumerate(sorted(answered))}
    found = list(queries.values())
    return Collection(
        [found[number] for number in kept],
        list(documents.values()),
        [(kept[query], document, grade) for query, document, grade in relevant],
        tuple(reader.bad),
    )


def _texts(reader: _Reader, path: str) -> dict[str, Reference]:
    """Id → what it stands for."""
    found: dict[str, Reference] = {}

    def begin(source: DataSource, table: Table) -> Callable[[Row], None]:
        column, text = _column(source, table, IDS, "an id"), _column(source, table, TEXTS, "the text")
        title = next((name for name in table.columns if name.lower() == TITLE and name != text), None)

        def take(row: Row) -> None:
            own = _id_in(row, column)
            if own in found:
                raise BadValue(f"the id {shown(own)} was in row {found[own]['row']} already")
            found[own] = {"row": row.number, "index": len(found), "id": own, "texts": (_text(row, text, title),)}

        return take

    reader.each(path, begin)
    return found


def _text(row: Row, column: str, title: str | None) -> str:
    above = str(row.fields.get(title) or "").strip() if title is not None else ""
    if not above:
        return text_in(row, column)
    below = str(row.fields.get(column) or "").strip()
    return text_in(row._replace(fields={column: f"{above} {below}".strip()}), column)


def _relevant(
    reader: _Reader, files: CollectionFiles, queries: dict[str, Reference], documents: dict[str, Reference]
) -> list[tuple[int, int, float]]:
    rows: dict[tuple[str, str], int] = {}
    found: list[tuple[int, int, float]] = []

    def begin(source: DataSource, table: Table) -> Callable[[Row], None]:
        of_query = _column(source, table, OF_QUERY, "the id of a query")
        of_document = _column(source, table, OF_DOCUMENT, "the id of a document")
        of_grade = next((name for name in table.columns if name.lower() in GRADES), None)

        def take(row: Row) -> None:
            query, document = _id_in(row, of_query), _id_in(row, of_document)
            for own, known, file in ((query, queries, files.queries), (document, documents, files.documents)):
                if own not in known:
                    raise BadValue(f"the id {shown(own)} is not in {file}")
            if (query, document) in rows:
                raise BadValue(
                    f"query {shown(query)} and document {shown(document)} were in row {rows[query, document]} already"
                )
            rows[query, document] = row.number
            grade = 1.0 if of_grade is None else _grade(row.fields.get(of_grade), of_grade)
            if grade > 0:
                found.append((queries[query]["index"], documents[document]["index"], grade))

        return take

    reader.each(files.relevant, begin)
    return found


def _empty(source: DataSource) -> DataError:
    return DataError(f"{source.name}: there are no rows in it", file=source.name, hint="an id and a text a row")


def _column(source: DataSource, table: Table, names: Sequence[str], what: str) -> str:
    known = {name.lower(): name for name in reversed(table.columns)}
    for name in names:
        if name in known:
            return known[name]
    raise DataError(
        f"{source.name}: none of its columns looks like {what}: {shown_columns(table.columns)}",
        file=source.name,
        hint=f"call it one of {', '.join(names[:4])}",
    )


def _id_in(row: Row, column: str) -> str:
    value = row.fields.get(column)
    own = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not own:
        missing = value is None or isinstance(value, str)
        raise BadValue(f"no {column}" if missing else f"{column} is {shown(value)}, not a name or a whole number")
    return own


def _grade(value: Any, column: str) -> float:
    try:
        grade = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        grade = None
    if grade is None or not isfinite(grade):
        raise BadValue(f"{column} is {shown(value)}, not a finite number")
    return grade
