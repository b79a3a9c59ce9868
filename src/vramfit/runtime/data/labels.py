"""Labels as text, their order, and the number of each."""

from collections.abc import Iterable, Sequence
from math import isfinite, isnan
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.runtime.data.bad_rows import BadValue
from vramfit.units import MAX_SHOWN_CHARACTERS, counted, shown

NUM_NAMED = 8
MISSING = "nan"
"""What pandas writes where a label is missing, in any case."""
OTHER_COLUMN = "name the column of the labels: --label-column NAME"
MANY = 10
"""Fewer labels than this are no reason to wonder, however few rows there are."""


def label_text(value: Any) -> str:
    """A label as its name: whole numbers and texts.

    Raises:
        BadValue: nothing, or something that names no class.

    >>> label_text(3), label_text(" spam "), label_text(True)
    ('3', 'spam', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not isnan(value):
        if not value.is_integer():
            raise BadValue(f"the label {value} is no class; predicting numbers (regression) is not supported")
        value = int(value)
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


def _is_decimal(name: str) -> bool:
    """Whether it is a number, and not a whole one."""
    try:
        value = float(name)
    except ValueError:
        return False
    return isfinite(value) and not value.is_integer()


def doubts(names: Sequence[str], num_rows: int) -> tuple[str, ...]:
    """What is strange about labels that were gathered from the data: decimals, or about as many as rows.

    >>> doubts(["0.5", "1.0", "2.25"], 300)[0].partition(":")[0]
    '3 labels in 300 rows, decimals among them (0.5, 2.25)'
    >>> doubts(["1.0", "2.0"], 300)
    ()
    """
    decimals = [name for name in names if _is_decimal(name)]
    few_rows = len(names) >= MANY and num_rows < 2 * len(names)
    if not decimals and not few_rows:
        return ()
    counts = f"{counted(len(names), 'label')} in {counted(num_rows, 'row')}"
    if decimals:
        what = f"{counts}, decimals among them ({some_of(decimals)}): each becomes a class of its own, and numbers "
        return (f"{what}(regression) are not predicted; sort them into a few classes, or {OTHER_COLUMN}",)
    return (f"{counts}: a class for nearly every row, of which little can be learned; take fewer, or {OTHER_COLUMN}",)


def some_of(names: Sequence[str]) -> str:
    """The first names, for a message."""
    named = [
        name if len(name) <= MAX_SHOWN_CHARACTERS else f"{name[:MAX_SHOWN_CHARACTERS]}…" for name in names[:NUM_NAMED]
    ]
    return ", ".join(named) + (", …" if len(names) > NUM_NAMED else "")


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
        self.unknown: list[str] = []
        """Labels that were asked for and are not among those given, one a row."""
        self._are_numbers = names is not None and any(_is_number(name) for name in names)
        self._by_number = False

    def name_of(self, value: Any) -> str:
        """The name of a label.

        Raises:
            BadValue: no label, or one outside the names.
        """
        text = label_text(value)
        if self._given is None or self._known is None or text in self._known:
            return text
        if _is_number(text) and not self._are_numbers and 0 <= int(text) < len(self._given):
            self._by_number = True
            return self._given[int(text)]
        self.unknown.append(text)
        raise BadValue(f"the label {shown(text)} is not one of the {len(self._given)} known: {some_of(self._given)}")

    @property
    def are_given(self) -> bool:
        """Whether they were known before the data."""
        return self._given is not None

    @property
    def some_known(self) -> str:
        """The first of those given."""
        return some_of(self._given or ())

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
