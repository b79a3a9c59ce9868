"""Rows as tasks see them: fields, texts, labels; what is wrong with a row is a `BadValue`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, NamedTuple

from vramfit.errors import WorkloadError
from vramfit.units import MAX_SHOWN_CHARACTERS, shown

Reference = dict[str, Any]
"""What is known of a sample beside its tokens: `row`, the line it begins on; `index`, the rows of data before it; and
the keys that its task's `read_row` puts in."""
MISSING = "nan"
"""What pandas writes where a label is missing, in any case."""
NUM_NAMED = 8
"""Names that a message shows of many."""


class BadValue(ValueError):
    """Raised while a row is looked at; the message says what is wrong with it."""

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


class Row(NamedTuple):
    """One row as it stands in the file."""

    number: int
    """The line it begins on, from 1; in a JSON document or a `datasets` folder, which one it is."""
    fields: dict[str, Any]
    problem: str = ""
    """What is wrong with it; the fields are then empty."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns to read."""

    texts: tuple[str, ...]
    label: str | None
    """None where no labels are wanted, or where texts are their own labels."""


def some_of(names: Sequence[str]) -> str:
    """The first names, for a message."""
    named = [
        name if len(name) <= MAX_SHOWN_CHARACTERS else f"{name[:MAX_SHOWN_CHARACTERS]}…" for name in names[:NUM_NAMED]
    ]
    return ", ".join(named) + (", …" if len(names) > NUM_NAMED else "")


def text_in(row: Row, column: str) -> str:
    """The text in a column of a row.

    Raises:
        BadValue: there is none, or something else is there.
    """
    value = row.fields.get(column)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if value is not None and not isinstance(value, str):
        raise BadValue(f"{column} is {shown(value)}, not a text")
    if value is None or not value.strip():
        raise BadValue(f"no {column}" if column not in row.fields else f"{column} is empty")
    check_characters(value, column)
    return value


def check_characters(text: str, column: str) -> None:
    """Raises BadValue for a text that cannot be encoded."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise BadValue(f"{column} has half of a surrogate pair, which is no character")


def label_text(value: Any) -> str:
    """A label as its name: numbers and texts.

    Raises:
        BadValue: nothing, or something that names no class.

    >>> label_text(3), label_text(" spam "), label_text(True)
    ('3', 'spam', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not isnan(value):
        value = int(value) if value.is_integer() else str(value)
    text = str(value).strip() if isinstance(value, str | int) else ""
    if not text or text.casefold() == MISSING:
        missing = value is None or isinstance(value, str | float)
        raise BadValue("the label is missing" if missing else f"the label is {shown(value)}, not a name or a number")
    return text


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Names in an order that depends on nothing else: whole numbers by value, otherwise by alphabet.

    >>> in_order({"10", "9"}), in_order({"b", "a", "1"})
    (('9', '10'), ('1', 'a', 'b'))
    """
    found = set(names)
    if all(_is_number(name) for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def _is_number(name: str) -> bool:
    return name.removeprefix("-").isdecimal() and name.isascii()


class LabelNames:
    """The names that labels may have: given, or gathered from the data.

    Args:
        given: names in the order of their numbers. A label that is a whole number then means the name at that place,
            unless the names are numbers themselves.
    """

    def __init__(self, given: Sequence[str] | None = None) -> None:
        names = None if given is None else tuple(str(name) for name in given)
        if names is not None and len(set(names)) != len(names):
            raise WorkloadError([f"label names repeat: {', '.join(names)}"])
        self._given = names
        self._known = None if names is None else frozenset(names)
        self.new: Counter[str] = Counter()
        """Labels that were asked for and are not among those given, lists of them too; and how often each was."""
        self._are_numbers = names is not None and any(_is_number(name) for name in names)
        self._by_number = False

    def name_of(self, value: Any) -> str:
        """The name of a label.

        Raises:
            BadValue: no label, or one outside the names.
        """
        if isinstance(value, list):
            self.new[str(value)] += 1
        text = label_text(value)
        if self._known is None or self._given is None:
            self.new[text] += 1
            return text
        if text in self._known:
            return text
        if _is_number(text) and not self._are_numbers and 0 <= int(text) < len(self._given):
            self._by_number = True
            return self._given[int(text)]
        self.new[text] += 1
        raise BadValue(f"the label {shown(text)} is not one of the {len(self._given)} known: {some_of(self._given)}")

    @property
    def are_given(self) -> bool:
        """Whether they were known before the data."""
        return self._given is not None

    @property
    def known(self) -> tuple[str, ...]:
        """Those given."""
        return self._given or ()

    def names(self, used: Iterable[str]) -> tuple[str, ...]:
        """All of them in order: those given, or those used."""
        return self._given if self._given is not None else in_order(used)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the labels that were asked for: which name each stands for, where they are numbers."""
        if not self._by_number:
            return ()
        pairs = some_of([f"{number} is {name}" for number, name in enumerate(self._given or ())])
        return (f"labels are numbers: {pairs}",)
