"""HTML from values: everything is escaped here and nowhere else; and the places of figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

Figure = dict[str, Any]
"""Data and layout as plotly takes them; a colour is `@name` and gets its value from the page's style."""


def tag(name: str, *inside: str, **attributes: str | None) -> str:
    """One element; what is inside is HTML already."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(v))}"' for key, v in attributes.items() if v)
    return f"<{name}{given}>{''.join(inside)}</{name}>"


def text(value: object) -> str:
    """A value as it reads."""
    return escape(str(value))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), stacked: bool = False
) -> str:
    """A table of texts; columns in `right` hold numbers; a `stacked` one has its cells below each other on a phone."""

    def cells(row: Sequence[str], cell: str) -> str:
        made = []
        for i, value in enumerate(row):
            kind = "th" if i == 0 and cell == "td" else cell
            scope = "row" if kind != cell else "col" if cell == "th" else None
            made.append(tag(kind, text(value), scope=scope, class_="number" if i in right else None))
        return tag("tr", *made)

    body = "".join(cells(row, "td") for row in rows)
    made = tag("table", tag("thead", cells(head, "th")) if head else "", tag("tbody", body))
    return tag("div", made, class_="wide stacked" if stacked else "wide")


def section(title: str, *inside: str, about: str = "") -> str:
    """A card with a heading."""
    said = tag("p", text(about), class_="quiet") if about else ""
    return tag("section", tag("h2", text(title)), said, *inside, class_="card")


@dataclass
class Drawn:
    """Figures by the id of their place."""

    figures: dict[str, Figure] = field(default_factory=dict)

    def place(self, name: str, figure: Figure, said: str) -> str:
        """Keep a figure, and give its place in the page; `said` is for those who do not see it."""
        self.figures[name] = figure
        height = f"height:{figure['layout']['height']}px"
        return tag("div", id=name, class_="figure", role="img", aria_label=said, style=height)
