"""Rows looked at one by one for a task: what a sample needs, or what is wrong with the row."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from vramfit.errors import DataError
from vramfit.runtime.data.columns import find_columns
from vramfit.runtime.data.documents import open_table
from vramfit.runtime.data.lines import NOT_UTF8, as_utf8
from vramfit.runtime.data.source import STANDARD_INPUT, DataSource
from vramfit.tasks.parts.reading import BadValue, Columns, LabelNames, Reference, in_order, some_of
from vramfit.units import counted

NUM_SHOWN = 5
"""Bad rows that a message shows."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used."""

    file: str
    row: int
    """The line it begins on, from 1; in a JSON document or a `datasets` folder, which one it is."""
    what: str
    hint: str = ""
    """What to do about it, where that is not to mend the row."""
    index: int = 0
    """Rows of data before it, bad ones counted."""


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
    kind, labels = source.kind, LabelNames(label_names)
    good: list[Reference] = []
    bad: list[BadRow] = []
    num_rows = 0
    with open_table(source) as table:
        columns: Columns | None = None
        for row in islice(table.rows, source.max_rows):
            index, num_rows = num_rows, num_rows + 1
            try:
                if row.problem:
                    raise BadValue(row.problem, hint=_hint(source, row.problem))
                columns = columns or find_columns(source, table, row.fields)
                good.append({"row": row.number, "index": index} | kind.read_row(row, columns, labels))
            except BadValue as error:
                bad.append(BadRow(source.name, row.number, str(error), error.hint, index))
    if columns is not None:
        has_others = len(table.columns) > len(columns.texts) + 1
        kind.check_labels(source.name, labels, num_rows, has_others=has_others)
    if bad and labels.are_given and len(bad) == num_rows == labels.new.total():
        raise _strange_labels(source, labels)
    if bad and not source.skip_bad_rows:
        raise refuse(bad, num_rows)
    if not good:
        all_bad = "its only row is bad" if num_rows == 1 else f"all {num_rows:,} rows are bad, the first"
        what = f"{all_bad}: {bad[0].what}" if bad else "there are no rows in it"
        raise DataError(f"{source.name}: {what}", file=source.name, rows=[b.row for b in bad], hint="one sample a row")
    names = kind.class_names(labels, good)
    notes = kind.notes(labels, names, len(good))
    if table.guess is not None:
        notes = (table.guess.note(needs_labels=source.needs_labels), *notes)
    return Examples(good, names, tuple(bad), notes)


def _hint(source: DataSource, problem: str) -> str:
    """What to do where a row cannot be read; nothing where it is to be mended."""
    if not problem.startswith(NOT_UTF8) or source.path == STANDARD_INPUT:
        return ""
    return as_utf8(source.path, "WINDOWS-1252")


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


def refuse(bad: Sequence[BadRow], num_rows: int) -> DataError:
    """The error for rows that the user did not allow to be skipped."""
    first = "; ".join(f"row {b.row}: {b.what}" for b in bad[:NUM_SHOWN])
    more = len(bad) - NUM_SHOWN
    advice = next((b.hint for b in bad if b.hint), "mend the rows")
    return DataError(
        f"{bad[0].file}: {len(bad):,} of {counted(num_rows, 'row')} cannot be used: {first}"
        + (f"; and {more:,} more" if more > 0 else ""),
        file=bad[0].file,
        rows=[b.row for b in bad],
        hint=advice if len(bad) == num_rows and bad[0].hint else f"{advice}, or leave the rows out: --skip-bad-rows",
    )
