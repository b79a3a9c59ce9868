"""Labels that are not one class a row: numbers to be predicted (regression), or several labels at once."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from vramfit.tasks.parts.reading import some_of
from vramfit.units import counted

OTHER_COLUMN = "name the column of the labels: --label-column NAME"
MANY = 10
"""Fewer labels than this are no reason to wonder, however few rows there are; nor are so few decimals, such as half
stars, where each of them comes again."""
MARKS = (",", ";")
"""They join labels where each part is a label of another row; elsewhere they belong to a name."""


@dataclass(frozen=True, slots=True)
class WrongKind:
    """What labels are instead of classes."""

    what: str
    hint: str


def wrong_kind(rows: Mapping[str, int], num_rows: int, known: Collection[str] = ()) -> WrongKind | None:
    """What labels are that cannot be learned or compared as classes; None where they can.

    Args:
        rows: label → how many rows have it; of those that are not known.
        num_rows: of all labels.
        known: names of classes, whatever they look like.

    >>> wrong_kind({"toxic": 5, "toxic|insult": 2}, 7).what
    'rows with several labels are not supported, and 2 of 7 rows have them: toxic|insult'
    >>> wrong_kind({f"{n / 8}": 1 for n in range(40)}, 40).what.partition(":")[0]
    'numbers are not predicted (regression is not supported), and the labels are 35 different decimals in 40 rows'
    >>> wrong_kind({"1.0": 20, "1.5": 20, "2.0": 20, "Food, Drinks": 20}, 80)
    """
    alone = {*rows, *known}
    several = [name for name in rows if _is_several(name, alone)]
    if several:
        num_several = sum(rows[name] for name in several)
        what = f"{num_several:,} of {counted(num_rows, 'row')} {'has' if num_several == 1 else 'have'} them"
        return WrongKind(
            f"rows with several labels are not supported, and {what}: {some_of(several)}",
            "give each row one label; a class whose own name has such a mark needs a name without it",
        )
    decimals = [name for name in rows if is_decimal(name)]
    are_repeated = sum(rows[name] for name in decimals) >= 2 * len(decimals)
    if len(decimals) > MANY or (len(decimals) > 1 and not are_repeated):
        return WrongKind(
            "numbers are not predicted (regression is not supported), and the labels are "
            f"{len(decimals):,} different decimals in {counted(num_rows, 'row')}: {some_of(decimals)}",
            "sort the numbers into a few classes with names; names that look like numbers need a letter before them",
        )
    return None


def doubts(names: Sequence[str], num_rows: int) -> tuple[str, ...]:
    """What is strange about labels that were gathered from the data: decimals, or about as many as rows.

    >>> doubts(["0.5", "1.0", "2.5"], 300)[0].partition(":")[0]
    '3 labels in 300 rows, decimals among them (0.5, 2.5)'
    >>> doubts(["1.0", "2.0"], 300)
    ()
    """
    decimals = [name for name in names if is_decimal(name)]
    few_rows = len(names) >= MANY and num_rows < 2 * len(names)
    if not decimals and not few_rows:
        return ()
    counts = f"{counted(len(names), 'label')} in {counted(num_rows, 'row')}"
    if decimals:
        what = f"{counts}, decimals among them ({some_of(decimals)}): each becomes a class of its own, and numbers "
        return (f"{what}(regression) are not predicted; sort them into a few classes, or {OTHER_COLUMN}",)
    return (f"{counts}: a class for nearly every row, of which little can be learned; take fewer, or {OTHER_COLUMN}",)


def is_decimal(name: str) -> bool:
    """Whether it is a number, with a point or a comma in it, and not a whole one.

    >>> is_decimal("3.75"), is_decimal("3,75"), is_decimal("3.0"), is_decimal("v1.2")
    (True, True, False, False)
    """
    try:
        value = float(name.replace(",", ".", 1))
    except ValueError:
        return False
    return isfinite(value) and not value.is_integer()


def _is_several(name: str, alone: Collection[str]) -> bool:
    """Whether a label is a list, or names with `|` between them, or labels of other rows with a comma between them."""
    if name.startswith("[") and name.endswith("]"):
        return name == "[]" or any(mark in name for mark in "',\"")
    if len(_parts(name, "|")) > 1:
        return True
    return any(len(parts) > 1 and all(part in alone for part in parts) for parts in (_parts(name, m) for m in MARKS))


def _parts(name: str, mark: str) -> list[str]:
    return [part.strip() for part in name.split(mark) if part.strip()]
