"""Markdown that benchmarks write: paragraphs and tables."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
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


def put(path: Path, script: str, **parts: str) -> None:
    """Write parts of a page between their marks: `<!-- NAME: made by SCRIPT -->` and `<!-- end of NAME -->`."""
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name}: made by {script} -->", f"<!-- end of {name} -->"
        before, found, _ = text.partition(begin)
        if not found:
            raise ValueError(f"{path} has no mark {begin}")
        text = f"{before}{begin}\n\n{part}\n\n{end}{text.partition(end)[2]}"
    path.write_text(text, encoding="utf-8")
