"""Markdown that benchmarks write: paragraphs and tables."""

from collections.abc import Iterable, Sequence
from textwrap import fill

WIDTH = 120


def paragraph(*texts: str) -> str:
    """Texts as one paragraph, wrapped."""
    return fill(" ".join(texts), WIDTH, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; None is a dash."""
    lines = [_row(head), "|" + "---|" * len(head)]
    return "\n".join([*lines, *(_row(row) for row in rows)])


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join("–" if cell is None else str(cell) for cell in cells) + " |"


def page(*parts: str) -> str:
    """Parts with an empty line between them."""
    return "\n\n".join(parts) + "\n"
