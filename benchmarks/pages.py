"""Markdown that benchmarks write: paragraphs and tables."""

import re
from collections.abc import Iterable, Sequence
from textwrap import fill

WIDTH = 120
NUMBER = re.compile(r"[−+-]?\d[\d,.]*( ?(%|×|[KMGT]iB|B|s|ms|min|h))?( \([\d.]+×\))?")


def paragraph(*texts: str) -> str:
    """Texts as one paragraph, wrapped."""
    return fill(" ".join(texts), WIDTH, break_long_words=False, break_on_hyphens=False)


def bullets(*items: str) -> str:
    """A list, each item wrapped."""
    wrapped = (
        fill(item, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for item in items
    )
    return "\n".join(wrapped)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; None is a dash, and columns of numbers are set right."""
    made = [list(row) for row in rows]
    rules = ("---:" if _is_numeric([row[i] for row in made]) else "---" for i in range(len(head)))
    return "\n".join([_row(head), f"|{'|'.join(rules)}|", *map(_row, made)])


def _is_numeric(column: Sequence[object]) -> bool:
    shown = [str(cell) for cell in column if cell not in (None, "")]
    return bool(shown) and all(NUMBER.fullmatch(cell) for cell in shown)


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join("–" if cell is None else str(cell) for cell in cells) + " |"


def page(*parts: str) -> str:
    """Parts with an empty line between them."""
    return "\n\n".join(parts) + "\n"
