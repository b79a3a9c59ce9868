"""Rows looked at one by one for a task: what a sample needs, or what is wrong with the row."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vramfit.errors import DataError
from vramfit.runtime.data.bad_rows import BadRow, BadValue, refuse, some_of
from vramfit.runtime.data.columns import FORMS, Columns, find_columns
from vramfit.runtime.data.documents import open_table
from vramfit.runtime.data.label_kinds import OTHER_COLUMN, WrongKind, doubts, wrong_kind
from vramfit.runtime.data.labels import LabelNames, in_order
from vramfit.runtime.data.lines import NOT_UTF8, as_utf8
from vramfit.runtime.data.rows import Row
from vramfit.runtime.data.source import STANDARD_INPUT, DataSource
from vramfit.units import counted, shown

Reference = dict[str, Any]
"""What is known of a sample beside its tokens: `row`, the line it begins on; `index`, the rows of data before it; and
by task the keys that each reader below puts in."""
WORD = re.compile(r"\w+|[^\w\s]")
"""Words of a text that no one has split: runs of letters and digits, and each mark by itself."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Everything read from a source."""

    references: list[Reference]
    label_names: tuple[str, ...]
    bad_rows: tuple[BadRow, ...]
    notes: tuple[str, ...] = ()
    """What to know of the columns and the labels."""


def read_examples(source: DataSource, label_names: Sequence[str] | None = None) -> Examples:
    """Reads and checks a source, row by row.

    Raises:
        DataError: a file that cannot be read, a column that is missing, labels that are not classes, no rows, or bad
            rows that were not to be skipped.
    """
    labels = LabelNames(label_names)
    good: list[Reference] = []
    bad: list[BadRow] = []
    num_rows = 0
    with open_table(source) as table:
        columns: Columns | None = None
        read = _READERS[source.task]
        for row in islice(table.rows, source.max_rows):
            index, num_rows = num_rows, num_rows + 1
            try:
                if row.problem:
                    raise BadValue(row.problem, hint=_hint(source, row.problem))
                columns = columns or find_columns(source, table, row.fields)
                good.append({"row": row.number, "index": index} | read(row, columns, labels))
            except BadValue as error:
                bad.append(BadRow(source.name, row.number, str(error), error.hint, index))
    if columns is not None and source.task == "sequence-classification":
        wrong = wrong_kind(labels.new, num_rows, labels.known)
        if wrong is not None:
            raise _no_classes(source, labels, wrong, has_others=len(table.columns) > len(columns.texts) + 1)
    if bad and labels.are_given and len(bad) == num_rows == labels.new.total():
        raise _strange_labels(source, labels)
    if bad and not source.skip_bad_rows:
        raise refuse(bad, num_rows)
    if not good:
        all_bad = "its only row is bad" if num_rows == 1 else f"all {num_rows:,} rows are bad, the first"
        what = f"{all_bad}: {bad[0].what}" if bad else "there are no rows in it"
        raise DataError(f"{source.name}: {what}", file=source.name, rows=[b.row for b in bad], hint="one sample a row")
    names = _label_names(source, labels, good)
    gathered = source.task == "sequence-classification" and not labels.are_given
    notes = doubts(names, len(good)) if gathered else labels.notes
    if table.guess is not None:
        notes = (table.guess.note(needs_labels=source.needs_labels), *notes)
    return Examples(good, names, tuple(bad), notes)


def _hint(source: DataSource, problem: str) -> str:
    """What to do where a row cannot be read; nothing where it is to be mended."""
    if not problem.startswith(NOT_UTF8) or source.path == STANDARD_INPUT:
        return ""
    return as_utf8(source.path, "WINDOWS-1252")


def _no_classes(source: DataSource, labels: LabelNames, wrong: WrongKind, *, has_others: bool) -> DataError:
    """The error for labels that are not classes; `has_others`: whether there are other columns to name."""
    hint = f"give data with the labels that are known: {some_of(labels.known)}" if labels.are_given else wrong.hint
    return DataError(
        f"{source.name}: {wrong.what}", file=source.name, hint=f"{hint}; or {OTHER_COLUMN}" if has_others else hint
    )


def _strange_labels(source: DataSource, labels: LabelNames) -> DataError:
    """The error for data of other labels than the model's."""
    theirs = some_of(in_order(labels.new))
    return DataError(
        f"{source.name}: no row has a label that is known: its labels are {theirs}; known are {some_of(labels.known)}",
        file=source.name,
        hint="the model learned other labels: give data that has them, or name their column: --label-column NAME",
    )


def check_classes(source: DataSource, names: Sequence[str]) -> None:
    """Raises DataError where there is only one class to learn."""
    if len(names) == 1:
        raise DataError(
            f"{source.name}: every row has the label {names[0]!r}: there is nothing to tell apart",
            file=source.name,
            hint="give rows of two labels or more" + ("; or more rows: --max-rows" if source.max_rows else ""),
        )


def read_example(task: str, row: Row, columns: Columns) -> Reference:
    """One row by itself, without a label.

    Raises:
        BadValue: it cannot be used; says why.
    """
    return {"row": row.number} | _READERS.get(task, _plain)(row, columns, LabelNames(None))


def _label_names(source: DataSource, labels: LabelNames, references: list[Reference]) -> tuple[str, ...]:
    """Names of the classes; none for tasks that have no classes."""
    if source.task == "sequence-classification":
        return labels.names(r["label"] for r in references if r["label"] is not None)
    if source.task == "token-classification":
        return labels.names(tag for r in references for tag in r["tags"] or ())
    return ()


def _text(row: Row, column: str) -> str:
    value = row.fields.get(column)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if value is not None and not isinstance(value, str):
        raise BadValue(f"{column} is {shown(value)}, not a text")
    if value is None or not value.strip():
        raise BadValue(f"no {column}" if column not in row.fields else f"{column} is empty")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise BadValue(f"{column} has half of a surrogate pair, which is no character")
    return value


def _label(row: Row, columns: Columns, labels: LabelNames) -> str | None:
    return None if columns.label is None else labels.name_of(row.fields.get(columns.label))


def _classified(row: Row, columns: Columns, labels: LabelNames) -> Reference:
    """`texts`: one or two; `label`: its name, or None."""
    return {"texts": tuple(_text(row, c) for c in columns.texts), "label": _label(row, columns, labels)}


def _plain(row: Row, columns: Columns, labels: LabelNames) -> Reference:
    """`texts`: one."""
    return {"texts": (_text(row, columns.texts[0]),)}


def _tagged(row: Row, columns: Columns, labels: LabelNames) -> Reference:
    """`text`; `spans`: where each word begins and ends in it; `tags`: their names, or None."""
    value = row.fields.get(columns.texts[0])
    if isinstance(value, list):
        text, spans = _joined(value, columns.texts[0])
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise BadValue(f"{columns.texts[0]} has half of a surrogate pair, which is no character")
    else:
        text = _text(row, columns.texts[0])
        found = re.finditer(r"\S+", text) if columns.label is not None else WORD.finditer(text)
        spans = [match.span() for match in found]
    if columns.label is None:
        return {"text": text, "spans": spans, "tags": None}
    tags = row.fields.get(columns.label)
    tags = tags.split() if isinstance(tags, str) else tags
    if not isinstance(tags, list):
        raise BadValue(f"{columns.label} is {'missing' if tags is None else shown(tags)}, not a list of tags")
    if len(tags) != len(spans):
        of_the_text = "" if labels.are_given else "; for one label a text: --task sequence-classification"
        hint = FORMS["token-classification"] + of_the_text if len(tags) == 1 else ""
        raise BadValue(f"{counted(len(tags), 'tag')} for {counted(len(spans), 'token')}", hint=hint)
    return {"text": text, "spans": spans, "tags": [labels.name_of(tag) for tag in tags]}


def _joined(tokens: list[Any], column: str) -> tuple[str, list[tuple[int, int]]]:
    """Tokens with a space between them, and the place of each."""
    if not tokens:
        raise BadValue(f"{column} is empty")
    strange = next((token for token in tokens if not isinstance(token, str)), None)
    if strange is not None or None in tokens:
        raise BadValue(f"{column} has {shown(strange)} in it, which is no text")
    spans = []
    begin = 0
    for token in tokens:
        spans.append((begin, begin + len(token)))
        begin += len(token) + 1
    return " ".join(tokens), spans


def _asked(row: Row, columns: Columns, labels: LabelNames) -> Reference:
    """`id`, `question`, `context`; `answers`: texts, none for a question without an answer, or None; `answer_at`:
    where the first one begins and ends in the context, or None."""
    question, context = (_text(row, column) for column in columns.texts)
    known: Reference = {"id": row.fields.get("id", row.number), "question": question, "context": context}
    if columns.label is None:
        return known | {"answers": None, "answer_at": None}
    answers = _answers(row.fields.get(columns.label), row.fields.get("answer_start"), columns.label)
    where = _locate(*answers[0], context) if answers else None
    return known | {"answers": [text for text, _ in answers], "answer_at": where}


def _answers(value: Any, start: Any, column: str) -> list[tuple[str, int | None]]:
    """Texts and places, from any of the forms that answers come in."""
    if value is None:
        raise BadValue(f"no {column}")
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start")
        texts = [texts] if isinstance(texts, str) else texts
        texts = texts if isinstance(texts, list) else [None]
        starts = starts if isinstance(starts, list) and len(starts) == len(texts) else [starts] * len(texts)
        pairs = list(zip(texts, starts, strict=True))
    else:
        entries = [{"text": value, "answer_start": start}] if isinstance(value, str) else value
        entries = entries if isinstance(entries, list) else [entries]
        entries = [e if isinstance(e, dict) else {"text": e} for e in entries]
        pairs = [(e.get("text"), e.get("answer_start")) for e in entries]
    if any(not isinstance(text, str) or not text.strip() for text, _ in pairs):
        raise BadValue(f"{column} has an answer without a text")
    return [(text, _place(begin)) for text, begin in pairs]


def _place(begin: Any) -> int | None:
    text = str(begin).strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _locate(answer: str, begin: int | None, context: str) -> tuple[int, int]:
    """Where an answer is: at its place, or else where it occurs nearest to it."""
    if begin is None or not context.startswith(answer, begin):
        wanted = begin or 0
        before, after = context.rfind(answer, 0, wanted + len(answer)), context.find(answer, wanted)
        found = [place for place in (before, after) if place >= 0]
        if not found:
            raise BadValue(f"the answer {shown(answer)} is not in its context")
        begin = min(found, key=lambda place: abs(place - wanted))
    return begin, begin + len(answer)


_READERS: dict[str, Callable[[Row, Columns, LabelNames], Reference]] = {
    "sequence-classification": _classified,
    "token-classification": _tagged,
    "question-answering": _asked,
    "masked-lm": _plain,
}
