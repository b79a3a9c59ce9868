"""Labels as text, their order, and the number of each."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isnan
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.runtime.data.bad_rows import BadValue, some_of
from vramfit.units import shown

MISSING = "nan"
"""What pandas writes where a label is missing, in any case."""


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
