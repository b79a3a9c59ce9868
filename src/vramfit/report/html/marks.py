"""What figures share: their places in the page, their unit and the line of a limit."""

from dataclasses import dataclass, field
from typing import Any

from vramfit.report.html.markup import tag
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


@dataclass
class Drawn:
    """Figures by the id of their place."""

    figures: dict[str, Figure] = field(default_factory=dict)

    def place(self, name: str, figure: Figure, said: str) -> str:
        """Keep a figure, and give its place in the page; `said` is for those who do not see it."""
        self.figures[name] = figure
        height = f"height:{figure['layout']['height']}px"
        return tag("div", id=name, class_="figure", role="img", aria_label=said, style=height)
