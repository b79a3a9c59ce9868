"""`Lengths`: how long samples really are, from a list or a file of numbers; of texts, `runtime.data` counts them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median_low
from typing import Any

from vramfit.errors import VramfitError
from vramfit.records.plan import LengthSummary
from vramfit.units import shown

ONE_EACH = "one whole number from 1 for each sample"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of each sample."""

    values: tuple[int, ...]
    source: str
    """Where they come from."""
    num_truncated: int = 0
    """Samples that are cut."""
    complete: bool = True
    """Whether every sample was seen."""

    @property
    def longest(self) -> int:
        return max(self.values)

    @property
    def varies(self) -> bool:
        return min(self.values) < self.longest

    def cut(self, limit: int) -> "Lengths":
        """The same samples cut to a limit; where not all of them were seen, one as long as it is expected."""
        num_cut = sum(n > limit for n in self.values)
        values = [min(n, limit) for n in self.values]
        if not self.complete:
            values[0] = limit
        return replace(self, values=tuple(values), num_truncated=num_cut)

    def summary(self) -> LengthSummary:
        """For the plan."""
        return LengthSummary(
            num_samples=len(self.values),
            mean=mean(self.values),
            median=median_low(self.values),
            longest=self.longest,
            num_truncated=self.num_truncated,
            source=self.source,
        )


def lengths_of(given: Any) -> Lengths:
    """Lengths from a list of numbers, or a text file with one number a line.

    Raises:
        VramfitError: a file that cannot be read, nothing in it, or something that is no number of tokens.

    >>> lengths_of([12, 512, 80]).longest
    512
    """
    if isinstance(given, Lengths):
        return given
    if isinstance(given, str | Path):
        try:
            lines = Path(given).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise VramfitError(f"cannot read {given}: {why}", hint="give a file with one length a line") from None
        return _checked(lines, str(given))
    try:
        values = list(given)
    except TypeError:
        raise VramfitError(f"lengths {shown(given)} are neither a list nor a file", hint=ONE_EACH) from None
    return _checked(values, "a list")


def _checked(values: Iterable[Any], source: str) -> Lengths:
    counts = []
    for number, value in enumerate(values, 1):
        text = str(value).strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and 0 < int(text) < 2**31):
            raise VramfitError(
                f"lengths, {source}: number {number} is {text[:40]!r}, not a number of tokens",
                hint=ONE_EACH,
            )
        counts.append(int(text))
    if not counts:
        raise VramfitError(f"lengths, {source}: nothing in it", hint=ONE_EACH)
    return Lengths(values=tuple(counts), source=source)
