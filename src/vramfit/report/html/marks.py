"""What figures share: their unit and the line of a limit."""

from typing import Any

from vramfit.units import GIB

Figure = dict[str, Any]
"""Data and layout as plotly takes them; a colour is `@name` and gets its value from the page's style."""


def gib(num_bytes: int) -> float:
    """A size in GiB, fine enough to draw."""
    return round(num_bytes / GIB, 5)


def limit_line(capacity_bytes: int | None) -> Figure:
    """A dashed line across the figure."""
    y = gib(capacity_bytes or 0)
    line = {"color": "@ink", "width": 2, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}
