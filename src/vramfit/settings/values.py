"""What the value of a setting may be: how it is checked, read from text, and described to a form or a schema."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from vramfit.errors import nearest_names
from vramfit.units import MAX_SHOWN_CHARACTERS, SizeError, parse_memory, plain, shown

MAX_COUNT = 2**31 - 1
"""Upper bound of every count: CUDA kernels index with 32 bits, and sizes stay exact integers."""


class Value(Protocol):
    """One kind of value."""

    @property
    def annotation(self) -> Any:
        """The type of a field that holds it."""

    @property
    def option_type(self) -> type:
        """What the command line reads: str, int, float or bool."""

    @property
    def metavar(self) -> str | None:
        """What help shows in place of a value."""

    def normal(self, value: Any) -> Any:
        """A value as it is kept: numbers of any package as Python's own, sizes in bytes; wrong values as they are."""

    def problems(self, name: str, value: Any) -> list[str]:
        """What is wrong with a value; nothing where it is right."""

    def parse(self, text: str) -> Any:
        """A value from text, as the command line and files of settings give it; wrong texts as they are."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several names."""

    names: tuple[str, ...]
    optional: bool = False
    meant: Callable[[object], str | None] = lambda value: None
    """What a wrong value was meant for, where the nearest name is not the answer."""
    metavar: str | None = "NAME"
    option_type: ClassVar[type] = str

    @property
    def annotation(self) -> Any:
        """A literal of the names."""
        one_of: Any = Literal.__getitem__(self.names)
        return one_of | None if self.optional else one_of

    def normal(self, value: Any) -> Any:
        """As it is."""
        return value

    def problems(self, name: str, value: Any) -> list[str]:
        """Any value but the names, with the nearest one."""
        if is_text(value, *self.names) or (value is None and self.optional):
            return []
        near = nearest_names(str(value)[:MAX_SHOWN_CHARACTERS], self.names, 1)[0]
        meant = self.meant(value) or f"nearest: {near}"
        return [f"{name} {shown(value)} is not one of {', '.join(self.names)} ({meant})"]

    def parse(self, text: str) -> str:
        """As it is."""
        return text


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number from 1."""

    optional: bool = False
    metavar: str | None = "N"
    option_type: ClassVar[type] = int

    @property
    def annotation(self) -> Any:
        """An int."""
        return int | None if self.optional else int

    def normal(self, value: Any) -> Any:
        """numpy's and torch's integers as Python's."""
        return plain(value)

    def problems(self, name: str, value: Any) -> list[str]:
        """Anything but whole numbers from 1."""
        if is_count(value) or (value is None and self.optional):
            return []
        return [f"{name} {shown(value)} is not a whole number from 1 to {MAX_COUNT:,}"]

    def parse(self, text: str) -> int | str:
        """A number where the text is one."""
        return number_or_text(text)


@dataclass(frozen=True, slots=True)
class Switch:
    """True or False."""

    optional: bool = False
    """Whether None leaves the choice to a plan."""
    metavar: ClassVar[None] = None
    option_type: ClassVar[type] = bool

    @property
    def annotation(self) -> Any:
        """A bool."""
        return bool | None if self.optional else bool

    def normal(self, value: Any) -> Any:
        """As it is."""
        return value

    def problems(self, name: str, value: Any) -> list[str]:
        """Anything else: the word "no" would turn it on."""
        if isinstance(value, bool) or (value is None and self.optional):
            return []
        return [f"{name} {shown(value)} is not True or False"]

    def parse(self, text: str) -> bool | str:
        """The usual words for on and off."""
        return {
            **dict.fromkeys(("true", "1", "yes", "on"), True),
            **dict.fromkeys(("false", "0", "no", "off"), False),
        }.get(text.strip().lower(), text)


@dataclass(frozen=True, slots=True)
class Bytes:
    """A size in bytes; text such as 11.17GiB is taken too."""

    metavar: str | None = "SIZE"
    annotation: ClassVar[Any] = int | None
    option_type: ClassVar[type] = str

    def normal(self, value: Any) -> Any:
        """Bytes; what is no size stays, and is a problem."""
        try:
            return None if value is None else parse_memory(value)
        except SizeError:
            return value

    def problems(self, name: str, value: Any) -> list[str]:
        """What is no size."""
        try:
            if value is not None:
                parse_memory(value, name=name)
        except SizeError as error:
            return [f"{error} ({error.hint})"]
        return []

    def parse(self, text: str) -> str:
        """As it is: `normal` reads it."""
        return text


@dataclass(frozen=True, slots=True)
class Number:
    """A number within bounds."""

    low: float = 0.0
    high: float = float("inf")
    wanted: str = "a positive number"
    includes_low: bool = False
    optional: bool = False
    metavar: str | None = "X"
    option_type: ClassVar[type] = float

    @property
    def annotation(self) -> Any:
        """A float."""
        return float | None if self.optional else float

    def normal(self, value: Any) -> Any:
        """numpy's and torch's numbers as Python's."""
        return plain(value)

    def problems(self, name: str, value: Any) -> list[str]:
        """Anything that is no number, or outside of the bounds."""
        if value is None and self.optional:
            return []
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (self.low <= value if self.includes_low else self.low < value) and value < self.high:
            return []
        return [f"{name} {shown(value)} is not {self.wanted}"]

    def parse(self, text: str) -> float | str:
        """A number where the text is one."""
        try:
            return float(text)
        except ValueError:
            return text


@dataclass(frozen=True, slots=True)
class Text:
    """Any text."""

    such: str = ""
    """An example, for messages."""
    optional: bool = True
    metavar: str | None = "NAME"
    option_type: ClassVar[type] = str

    @property
    def annotation(self) -> Any:
        """A str."""
        return str | None if self.optional else str

    def normal(self, value: Any) -> Any:
        """As it is."""
        return value

    def problems(self, name: str, value: Any) -> list[str]:
        """Anything but texts."""
        if (isinstance(value, str) and (value or self.optional)) or (value is None and self.optional):
            return []
        return [f"{name} {shown(value)} is not a text such as {self.such!r}"]

    def parse(self, text: str) -> str:
        """As it is."""
        return text


def is_text(value: object, *known: str) -> bool:
    """Whether it is one of these; an array would compare each of its elements."""
    return isinstance(value, str) and value in known


def is_count(value: object) -> bool:
    """Whether it is a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT


def number_or_text(text: str) -> int | str:
    """A whole number where the text is one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else text
