"""Which columns hold the texts and the labels: as named, or guessed from the names that data sets use."""

from collections.abc import Mapping
from typing import Any

from vramfit.errors import NEAR, DataError, nearest_names
from vramfit.runtime.data.rows import Table
from vramfit.runtime.data.source import DataSource
from vramfit.tasks import all_tasks
from vramfit.tasks.parts.reading import Columns


def find_columns(source: DataSource, table: Table, first: Mapping[str, Any]) -> Columns:
    """The columns of a table that a source means.

    Args:
        first: the fields of a row, which tell for what task they are where they are not for this one.

    Raises:
        DataError: a column that is not there, with those that are; nothing that looks like the texts or the label;
            or two columns of the name that is wanted.
    """
    found = _find_columns(source, table, first)
    for name in (*found.texts, *([found.label] if found.label is not None else [])):
        if table.columns.count(name) > 1:
            raise DataError(
                f"{source.name} has {table.columns.count(name)} columns called {name!r}",
                file=source.name,
                hint="give each column of the header a name of its own",
            )
    return found


def _find_columns(source: DataSource, table: Table, first: Mapping[str, Any]) -> Columns:
    if table.guess is not None:
        return Columns((table.guess.text,), table.guess.label if source.needs_labels else None)
    for name in source.text_columns:
        if name not in table.columns:
            labels = (source.label_column, *source.kind.label_columns)
            raise _missing(source, table, name, [c for c in table.columns if c.lower() not in labels])
    if source.label_column and source.label_column not in table.columns:
        others = [c for c in table.columns if c not in source.text_columns]
        raise _missing(source, table, source.label_column, others)
    texts = source.text_columns or _guess_texts(source, table, first)
    if not source.needs_labels or not source.kind.reads_labels:
        return Columns(texts, None)
    return Columns(texts, source.label_column or _guess_label(source, table, first, texts))


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
    return DataError(
        f"{source.name} has no column {name!r}; it has {_shown(table.columns)}",
        file=source.name,
        hint=hint if table.columns else "a header line, then one sample a row",
    )


def _unknown(source: DataSource, table: Table, first: Mapping[str, Any], what: str, naming: str) -> DataError:
    """The error for columns whose names say nothing; `naming` is the option that does."""
    hint, files = naming, source.kind.files
    if source.needs_labels and files:
        hint = f"{files}; or {naming}"
    elif source.path.endswith((".csv", ".tsv")) and not table.by_position:
        hint += "; in a file without a header, count from 1: --text-column 2 --label-column 1"
    other = _other_task(source, table, first)
    if other is not None and source.of_model:
        hint = f"the model does {source.task}, and these are columns for {other}: give data for its task, or {naming}"
    elif other is not None:
        hint = f"these are the columns of another task: --task {other}" + (f"; {files}" if files else "")
    return DataError(
        f"{source.name}: none of its columns looks like {what}: {_shown(table.columns)}", file=source.name, hint=hint
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


def _shown(columns: tuple[str, ...], most: int = 12) -> str:
    names = [name if len(name) <= 40 else f"{name[:39]}…" for name in columns[:most]]
    more = len(columns) - most
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
