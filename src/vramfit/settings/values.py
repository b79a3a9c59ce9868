"""What the value of a setting may be: how it is checked, read from text, and described to a form or a schema."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vramfit.errors import nearest_names
from vramfit.units import MAX_SHOWN_CHARACTERS, SizeError, parse_memory, plain, shown

MAX_COUNT = 2**31 - 1
"""Upper bound of every count: CUDA kernels index with 32 bits, and sizes stay exact integers."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One kind of value."""

    optional: bool = False
    """Whether None is a value too."""
    metavar: str | None = None
    """What help shows in place of a value."""
    kind: ClassVar[Any] = str
    """The type of a field that holds it, but for None."""
    option_type: ClassVar[type] = str
    """What the command line reads: str, int, float or bool."""

    @property
    def annotation(self) -> Any:
        """The type of a field that holds it."""
        return self.kind | None if self.optional else self.kind

    def normal(self, value: Any) -> Any:
        """A value as it is kept: numbers of any package as Python's own, sizes in bytes; wrong values as they are."""
        return plain(value)

    def problems(self, name: str, value: Any) -> list[str]:
        """What is wrong with a value; nothing where it is right."""
        is_right = (value is None and self.optional) or self.is_right(value)
        return [] if is_right else [f"{name} {shown(value)} is not {self.wanted(value)}"]

    def is_right(self, value: Any) -> bool:
        """Whether it is a value."""
        return isinstance(value, self.kind)

    def wanted(self, value: Any) -> str:
        """What should be there in place of a wrong value."""
        raise NotImplementedError

    def parse(self, text: str) -> Any:
        """A value from text, as the command line and files of settings give it; wrong texts as they are."""
        return text


@dataclass(frozen=True, kw_only=True)
class Choice(Value):
    """One of several names."""

    names: tuple[str, ...]
    hidden: tuple[str, ...] = ()
    """Names that are taken, and that help, the page and the docs leave out."""
    meant: Callable[[object], str | None] = lambda value: None
    """What a wrong value was meant for, where the nearest name is not the answer."""
    metavar: str | None = "NAME"

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The names that people choose from."""
        return tuple(name for name in self.names if name not in self.hidden)

    @property
    def kind(self) -> Any:
        """A literal of the names."""
        return Literal.__getitem__(self.names)

    def is_right(self, value: Any) -> bool:
        return is_text(value, *self.names)

    def wanted(self, value: Any) -> str:
        near = nearest_names(str(value)[:MAX_SHOWN_CHARACTERS], self.shown_names, 1)[0]
        return f"one of {', '.join(self.shown_names)} ({self.meant(value) or f'nearest: {near}'})"


@dataclass(frozen=True, kw_only=True)
class Count(Value):
    """A whole number from 1."""

    metavar: str | None = "N"
    none: str = ""
    """What to take in place of 0."""
    kind: ClassVar[Any] = int
    option_type: ClassVar[type] = int

    def is_right(self, value: Any) -> bool:
        return is_count(value)

    def wanted(self, value: Any) -> str:
        instead = f": {self.none}" if self.none and shown(value) == "0" else ""
        return f"a whole number from 1 to {MAX_COUNT:,}{instead}"

    def parse(self, text: str) -> int | str:
        return number_or_text(text)


@dataclass(frozen=True, kw_only=True)
class Counts(Value):
    """Whole numbers from 1, with commas between them."""

    of: str = ""
    """What they count, for messages."""
    optional: bool = True
    metavar: str | None = "N,…"
    kind: ClassVar[Any] = tuple[int, ...]

    def normal(self, value: Any) -> Any:
        return tuple(map(plain, value)) if isinstance(value, list | tuple) else value

    def problems(self, name: str, value: Any) -> list[str]:
        if value is None:
            return []
        wrong = [n for n in value if not is_count(n)] if isinstance(value, tuple) else [value]
        what = f"whole numbers {f'of {self.of}' if self.of else ''}from 1"
        return [f"{name} {shown(wrong[:3] or ())} are not {what}"] if wrong or not value else []

    def parse(self, text: str) -> Any:
        return tuple(number_or_text(part.strip()) for part in text.split(","))


@dataclass(frozen=True, kw_only=True)
class Switch(Value):
    """True or False."""

    kind: ClassVar[Any] = bool
    option_type: ClassVar[type] = bool

    def normal(self, value: Any) -> Any:
        is_numpy = str(getattr(value, "dtype", "")) == "bool" and value.ndim == 0
        return bool(value) if is_numpy else value

    def wanted(self, value: Any) -> str:
        return "True or False"  # the word "no" would turn it on

    def parse(self, text: str) -> bool | str:
        word = text.strip().lower()
        return True if word in ("true", "1", "yes", "on") else False if word in ("false", "0", "no", "off") else text


@dataclass(frozen=True, kw_only=True)
class Bytes(Value):
    """A size in bytes; text such as 11.17GiB is taken too."""

    optional: bool = True
    metavar: str | None = "SIZE"
    kind: ClassVar[Any] = int

    def normal(self, value: Any) -> Any:
        try:
            return None if value is None else parse_memory(value)
        except SizeError:
            return value

    def problems(self, name: str, value: Any) -> list[str]:
        try:
            if value is not None:
                parse_memory(value, name=name)
        except SizeError as error:
            return [f"{error} ({error.hint})"]
        return []


@dataclass(frozen=True, kw_only=True)
class Number(Value):
    """A number within bounds."""

    low: float = 0.0
    includes_low: bool = False
    high: float = float("inf")
    words: str = "a positive number"
    metavar: str | None = "X"
    kind: ClassVar[Any] = float
    option_type: ClassVar[type] = float

    def is_right(self, value: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        return (self.low <= value if self.includes_low else self.low < value) and value < self.high

    def wanted(self, value: Any) -> str:
        return self.words

    def parse(self, text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text


@dataclass(frozen=True, kw_only=True)
class Text(Value):
    """Any text; an empty one only where there may be none."""

    such: str = ""
    """An example, for messages."""
    optional: bool = True
    metavar: str | None = "NAME"

    def normal(self, value: Any) -> Any:
        return value

    def is_right(self, value: Any) -> bool:
        return isinstance(value, str) and (bool(value) or self.optional)

    def wanted(self, value: Any) -> str:
        return f"a text such as {self.such!r}"


@dataclass(frozen=True, kw_only=True)
class Texts(Value):
    """Several texts with commas between them."""

    metavar: str | None = "NAME,…"
    kind: ClassVar[Any] = tuple[Any, ...]

    def normal(self, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    def is_right(self, value: Any) -> bool:
        return isinstance(value, tuple) and all(isinstance(one, str) for one in value)

    def wanted(self, value: Any) -> str:
        return "a list of names"

    def parse(self, text: str) -> Any:
        return tuple(part.strip() for part in text.split(",") if part.strip())


def is_text(value: object, *known: str) -> bool:
    """Whether it is one of these; an array would compare each of its elements."""
    return isinstance(value, str) and value in known


def is_count(value: object) -> bool:
    """Whether it is a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_COUNT


def number_or_text(text: str) -> int | str:
    """A whole number where the text is one."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else text
