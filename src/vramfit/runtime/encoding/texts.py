"""The texts of any data as a stream of parts; what was read of it before is read again and compared."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from vramfit.errors import DataError
from vramfit.runtime.data.examples import BadRow, RowReader, refuse
from vramfit.runtime.data.source import DataSource
from vramfit.tasks import vector_task
from vramfit.tasks.parts.reading import BadValue, LabelNames, Reference, check_characters
from vramfit.units import counted

PART_ROWS = 8192
"""Rows of a part on a GPU: enough that texts of like length fill batches."""
HOST_PART_ROWS = 1024
"""The same where a CPU computes: a run that is ended loses a minute, not an hour."""
PART_CHARACTERS = 2**25
"""A part ends beyond so many, so that very long texts do not fill the memory."""
LISTED = "the texts"
"""What a list is called in messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far data was read."""

    num_rows: int = 0
    num_bad: int = 0
    """Rows among them that were left out."""
    first_bad: str = ""
    """What is wrong with the first of those."""
    digest: str = ""
    """Of all that was read."""


START = Position()


@dataclass(frozen=True, slots=True)
class TextPart:
    """Some rows of the data."""

    references: list[Reference]
    end: Position
    """Behind it."""


class TextStream:
    """The rows of a file or a list, in parts.

    Args:
        rows: what `RowReader` gives, or `listed`.
        name: of the data, for messages.
        skips: whether bad rows are left out; otherwise they are an error.
    """

    def __init__(self, rows: Iterable[Reference | BadRow], *, name: str, skips: bool) -> None:
        self._rows, self._name, self._skips = iter(rows), name, skips
        self._digest = hashlib.blake2b(digest_size=16)
        self._end = START

    def pass_over(self, before: Position) -> None:
        """Read again what a run has read before.

        Raises:
            DataError: it is something else now.
        """
        while self._end.num_rows < before.num_rows and self._next() is not None:
            pass
        if before.num_rows and (self._end.num_rows, self._digest.hexdigest()) != (before.num_rows, before.digest):
            found = f"there are {self._end.num_rows:,}" if self._end.num_rows < before.num_rows else "they are others"
            raise DataError(
                f"{self._name} has changed: {before.num_rows:,} rows of it are encoded, and now {found}",
                file=self._name,
                hint="give the data that the run began with, or begin anew without --resume, with another --output",
            )

    def parts(self, num_rows: int = PART_ROWS) -> Iterator[TextPart]:
        """What is left, in order, so many rows at a time.

        Raises:
            DataError: bad rows that are not to be left out, with their numbers; or no rows at all.
        """
        good: list[Reference] = []
        bad: list[BadRow] = []
        begin, num_characters = self._end.num_rows, 0
        while (found := self._next()) is not None:
            if isinstance(found, BadRow):
                bad.append(found)
            else:
                good.append(found)
                num_characters += len(found["texts"][0])
            if self._end.num_rows - begin >= num_rows or num_characters > PART_CHARACTERS:
                yield self._part(good, bad, begin)
                good, bad, begin, num_characters = [], [], self._end.num_rows, 0
        if self._end.num_rows > begin:
            yield self._part(good, bad, begin)
        if self._end.num_rows == self._end.num_bad:
            what = f"all of {counted(self._end.num_rows, 'row')} cannot be used; the first is {self._end.first_bad}"
            what = what if self._end.num_bad else "there are no rows in it"
            raise DataError(f"{self._name}: {what}", file=self._name, hint="one text a row")

    def _part(self, good: list[Reference], bad: list[BadRow], begin: int) -> TextPart:
        if bad and not self._skips:
            raise refuse(bad, self._end.num_rows - begin)
        self._end = replace(self._end, digest=self._digest.hexdigest())
        return TextPart(good, self._end)

    def _next(self) -> Reference | BadRow | None:
        found = next(self._rows, None)
        if found is None:
            return None
        end = replace(self._end, num_rows=self._end.num_rows + 1, digest="")
        if isinstance(found, BadRow):
            self._digest.update(b"-:")
            first = end.first_bad or f"row {found.row}: {found.what}"
            self._end = replace(end, num_bad=end.num_bad + 1, first_bad=first)
        else:
            text = found["texts"][0]
            self._digest.update(f"{len(text)}:".encode() + text.encode("utf-8", "surrogatepass"))
            self._end = end
        return found


def open_stream(data: Any, *, text_column: str | None, max_rows: int | None, skips: bool) -> TextStream:
    """The texts of a file by its name, or of any iterable of texts.

    Raises:
        WorkloadError: several columns.
    """
    if not isinstance(data, str):
        return TextStream(_listed(data, max_rows), name=LISTED, skips=skips)
    source = source_of(data, text_column, max_rows, skips=skips)
    return TextStream(_single(source), name=source.name, skips=skips)


def source_of(path: str, text_column: str | None, max_rows: int | None, *, skips: bool) -> DataSource:
    """How a file is read for vectors."""
    columns = () if text_column is None else (text_column,)
    more: dict[str, Any] = {"needs_labels": False, "skip_bad_rows": skips, "max_rows": max_rows, "of_model": True}
    return DataSource(path=path, task=vector_task().name, text_columns=columns, **more)


def check_single(name: str, columns: tuple[str, ...]) -> None:
    """Raises DataError where columns of several texts were found, and none was named."""
    if len(columns) > 1:
        raise DataError(
            f"{name} has several columns of texts: {', '.join(columns)}; a row gets one vector",
            file=name,
            hint=f"name one: --text-column {columns[0]}",
        )


def _single(source: DataSource) -> Iterator[Reference | BadRow]:
    reader = RowReader(source, LabelNames())
    for found in reader.rows():
        if reader.columns is not None:
            check_single(source.name, reader.columns.texts)
        yield found


def _listed(texts: Iterable[Any], max_rows: int | None) -> Iterator[Reference | BadRow]:
    """Texts of a list; an empty one has a vector too."""
    for index, text in enumerate(texts):
        if index == max_rows:
            return
        try:
            if not isinstance(text, str):
                raise BadValue(f"{type(text).__name__}, not a text")
            check_characters(text, "it")
        except BadValue as error:
            yield BadRow(LISTED, index + 1, str(error), index=index)
        else:
            yield {"row": index + 1, "index": index, "texts": (text,)}
