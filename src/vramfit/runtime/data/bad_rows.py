"""`BadRow`: a row that cannot be used, and the error that many of them make."""

from collections.abc import Sequence
from dataclasses import dataclass

from vramfit.errors import DataError
from vramfit.units import MAX_SHOWN_CHARACTERS, counted

NUM_SHOWN = 5
NUM_NAMED = 8


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


class BadValue(ValueError):
    """Raised while a row is looked at; the message says what is wrong with it."""

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


def some_of(names: Sequence[str]) -> str:
    """The first names, for a message."""
    named = [
        name if len(name) <= MAX_SHOWN_CHARACTERS else f"{name[:MAX_SHOWN_CHARACTERS]}…" for name in names[:NUM_NAMED]
    ]
    return ", ".join(named) + (", …" if len(names) > NUM_NAMED else "")


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
