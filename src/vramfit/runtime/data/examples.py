"""Columns found and rows looked at one by one for a task: what a sample needs, or what is wrong with the row."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vramfit.errors import NEAR, DataError, nearest_names
from vramfit.runtime.data.rows import Guess, Table, open_table
from vramfit.runtime.data.source import NOT_UTF8, STANDARD_INPUT, DataSource, as_utf8
from vramfit.stages import tell
from vramfit.tasks import all_tasks
from vramfit.tasks.parts.heads import MULTI_LABEL, REGRESSION, SINGLE
from vramfit.tasks.parts.reading import Asked, BadValue, Columns, LabelNames, Reference, in_order, some_of
from vramfit.units import counted

NUM_SHOWN = 5
"""Bad rows that a message shows."""
TOLD_ROWS = 8_192
"""Rows after which it is told how many were read."""
PLAIN_TEXT = "plain text is a text a line, without labels: give a .csv or .jsonl file that has both, as text and label"


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
    problem: str | None = None
    """What a head learns from the labels, of a task whose head may learn several things."""


def read_examples(source: DataSource, label_names: Sequence[str] | None = None) -> Examples:
    """Reads and checks a source, row by row.

    Raises:
        DataError: a file that cannot be read, a column that is missing, labels that are not classes, no rows, or bad
            rows that were not to be skipped.
    """
    kind, labels = source.kind, LabelNames(label_names, source.problem)
    good: list[Reference] = []
    bad: list[BadRow] = []
    reader = RowReader(source, labels)
    for found in reader.rows():
        if isinstance(found, BadRow):
            bad.append(found)
        else:
            good.append(found)
        if reader.num_rows % TOLD_ROWS == 0:
            tell(f"reading {source.name}, {reader.num_rows:,} rows so far")
    columns, num_rows = reader.columns, reader.num_rows
    if columns is not None and columns.label is not None:
        wrong_labels = kind.read_labels(good, columns, labels)
        bad += [_bad(source, good[number], str(wrong), wrong.hint) for number, wrong in wrong_labels.items()]
    bad += [_bad(source, good[number], what) for number, what in kind.unusable(good).items()]
    if bad:
        out = {row.index for row in bad}
        good = [reference for reference in good if reference["index"] not in out]
        bad.sort(key=lambda row: row.index)
    if columns is not None:
        has_others = len(reader.names) > len(columns.texts) + 1
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
    if columns is not None and columns.note:
        notes = (columns.note, *notes)
    if reader.guess is not None:
        notes = (reader.guess.note(needs_labels=source.needs_labels), *notes)
    return Examples(good, names, tuple(bad), notes, labels.problem)


def _bad(source: DataSource, reference: Reference, what: str, hint: str = "") -> BadRow:
    return BadRow(source.name, reference["row"], what, hint, reference["index"])


class RowReader:
    """The rows of a source, looked at one by one; none is kept.

    Args:
        source: which file and which columns.
        labels: that rows may have; it learns those that they have.
    """

    def __init__(self, source: DataSource, labels: LabelNames) -> None:
        self._source, self._labels = source, labels
        self.num_rows = 0
        """Rows looked at so far."""
        self.columns: Columns | None = None
        """Known from the first row that can be read."""
        self.names: tuple[str, ...] = ()
        """Of all columns, once rows are read."""
        self.guess: Guess | None = None
        """Of columns without names, once rows are read."""

    def rows(self) -> Iterator[Reference | BadRow]:
        """What a sample needs of each row, or what is wrong with it; once.

        Raises:
            DataError: a file that cannot be read, or a column that is missing.
        """
        source = self._source
        with open_table(source) as table:
            self.names, self.guess = table.columns, table.guess
            for row in islice(table.rows, source.max_rows):
                index, self.num_rows = self.num_rows, self.num_rows + 1
                try:
                    if row.problem:
                        raise BadValue(row.problem, hint=_hint(source, row.problem))
                    self.columns = self.columns or find_columns(source, table, row.fields, self._labels.known)
                    read = source.kind.read_row(row, self.columns, self._labels)
                    found: Reference | BadRow = {"row": row.number, "index": index} | read
                except BadValue as error:
                    found = BadRow(source.name, row.number, str(error), error.hint, index)
                yield found


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


def check_learnable(source: DataSource, examples: Examples) -> None:
    """Raises DataError where training data has nothing to tell apart: one class, no labels, or equal texts."""
    names, problem = examples.label_names, examples.problem
    equal = source.kind.nothing_to_learn(examples.references)
    if equal is not None:
        raise DataError(
            f"{source.name}: {equal}: there is nothing to tell apart",
            file=source.name,
            hint="give rows of different texts, or name their columns: --text-column ANCHOR,POSITIVE",
        )
    if problem == MULTI_LABEL and not names:
        raise DataError(
            f"{source.name}: no row has a label: there is nothing to learn", file=source.name, hint="give some labels"
        )
    if len(names) == 1 and problem in (None, SINGLE):
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


def find_columns(source: DataSource, table: Table, first: Mapping[str, Any], learned: tuple[str, ...] = ()) -> Columns:
    """The columns of a table that a source means.

    Args:
        first: the fields of a row, which tell for what task they are where they are not for this one.
        learned: names of what a model learned; of numbers and several labels, columns may have them.

    Raises:
        DataError: a column that is not there, with those that are; nothing that looks like the texts or the label;
            or two columns of the name that is wanted.
    """
    found = _find_columns(source, table, first, learned)
    for name in (*found.texts, *found.labels, *([found.label] if found.label is not None else [])):
        if table.columns.count(name) > 1:
            raise DataError(
                f"{source.name} has {table.columns.count(name)} columns called {name!r}",
                file=source.name,
                hint="give each column of the header a name of its own",
            )
    return found


def _find_columns(source: DataSource, table: Table, first: Mapping[str, Any], learned: tuple[str, ...]) -> Columns:
    if table.guess is not None:
        return Columns((table.guess.text,), table.guess.label if source.needs_labels else None)
    for name in source.text_columns:
        if name not in table.columns:
            labels = (source.label_column, *source.kind.label_columns)
            raise _missing(source, table, name, [c for c in table.columns if c.lower() not in labels])
    several = _several_labels(source, table, learned)
    if source.label_column and source.label_column not in table.columns and not several:
        others = [c for c in table.columns if c not in source.text_columns]
        raise _missing(source, table, source.label_column, others)
    own = source.kind.choose_columns(_asked(source, table, first))
    if own is not None:
        return own
    texts = source.text_columns or _guess_texts(source, table, first)
    if not source.needs_labels or not source.kind.reads_labels:
        return Columns(texts, None)
    if several:
        return Columns(texts, ", ".join(several), labels=several if len(several) > 1 else ())
    return Columns(texts, source.label_column or _guess_label(source, table, first, texts))


def _several_labels(source: DataSource, table: Table, learned: tuple[str, ...]) -> tuple[str, ...]:
    """Columns of a number, or a yes or no, each: those that are named, or those that a model learned."""
    named = tuple(part.strip() for part in (source.label_column or "").split(","))
    if not source.kind.has_problems or not source.needs_labels or source.label_column in table.columns:
        return ()
    if source.label_column is None:
        named = learned if source.problem == REGRESSION or (source.problem == MULTI_LABEL and len(learned) > 1) else ()
    elif len(named) == 1 or len(set(named)) < len(named):
        return ()
    if not all(name in table.columns for name in named):
        return ()
    return learned if set(learned) == set(named) else named


def _asked(source: DataSource, table: Table, first: Mapping[str, Any]) -> Asked:
    return Asked(
        file=source.name,
        names=table.columns,
        first=first,
        texts=source.text_columns,
        label=source.label_column,
        needs_labels=source.needs_labels,
        loss=source.loss,
    )


def _guess_texts(source: DataSource, table: Table, first: Mapping[str, Any]) -> tuple[str, ...]:
    kind = source.kind
    known = {name.lower(): name for name in reversed(table.columns)}
    for names in kind.text_names:
        if all(name in known for name in names):
            return tuple(known[name] for name in names)
    others = [name for name in table.columns if name != source.label_column]
    if len(others) == 1 and kind.num_texts[0] == 1 and (source.label_column or not source.needs_labels):
        return (others[0],)
    raise _unknown(source, table, first, kind.columns_wanted(labels=source.needs_labels), kind.naming_texts)


def _guess_label(source: DataSource, table: Table, first: Mapping[str, Any], texts: tuple[str, ...]) -> str:
    known = {name.lower(): name for name in reversed(table.columns) if name not in texts}
    for name in source.kind.label_columns:
        if name in known:
            return known[name]
    if source.text_columns and len(known) == 1:
        return next(iter(known.values()))
    raise _unknown(source, table, first, source.kind.label_wanted, "name it: --label-column NAME")


def _missing(source: DataSource, table: Table, name: str, candidates: list[str]) -> DataError:
    """The error for a column that is not there; of the candidates, the one that was meant is named."""
    nearest = nearest_names(name, candidates, 1, least=NEAR)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "name one of them"
    if table.is_plain_text and source.needs_labels and source.kind.reads_labels:
        hint = source.kind.files or PLAIN_TEXT
    return DataError(
        f"{source.name} has no column {name!r}; it has {shown_columns(table.columns)}",
        file=source.name,
        hint=hint if table.columns else "a header line, then one sample a row",
    )


def _unknown(source: DataSource, table: Table, first: Mapping[str, Any], what: str, naming: str) -> DataError:
    """The error for columns whose names say nothing; `naming` is the option that does."""
    hint, files = naming, source.kind.files
    if table.is_plain_text:
        hint = files or PLAIN_TEXT
    elif source.needs_labels and files:
        hint = f"{files}; or {naming}"
    elif source.path.endswith((".csv", ".tsv")) and not table.by_position:
        hint += "; in a file without a header, count from 1: --text-column 2 --label-column 1"
    other = _other_task(source, table, first)
    if other is not None and source.of_model:
        hint = f"the model does {source.task}, and these are columns for {other}: give data for its task, or {naming}"
    elif other is not None:
        hint = f"these are the columns of another task: --task {other}" + (f"; {files}" if files else "")
    return DataError(
        f"{source.name}: none of its columns looks like {what}: {shown_columns(table.columns)}",
        file=source.name,
        hint=hint,
    )


def _other_task(source: DataSource, table: Table, first: Mapping[str, Any]) -> str | None:
    """The task that texts and labels of this table are for, where it is not the one asked for."""
    names = {name.lower() for name in table.columns}
    lists = {name.lower() for name, value in first.items() if isinstance(value, list)}
    for task in sorted(all_tasks(), key=lambda task: -task.num_texts[0]):  # those that need most columns first
        usable = names if task.takes_lists else names - lists
        texts = any(usable.issuperset(choice) for choice in task.text_names)
        if task.is_trained and task.name != source.task and texts and usable.intersection(task.label_columns):
            return task.name
    return None


def shown_columns(columns: tuple[str, ...], most: int = 12) -> str:
    """Their names, for a message."""
    names = [name if len(name) <= 40 else f"{name[:39]}…" for name in columns[:most]]
    more = len(columns) - most
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
