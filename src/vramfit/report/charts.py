"""Tables, bars, curves and points in lines of text: as wide as their place, and readable without colour."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from math import ceil
from typing import Concatenate, ParamSpec

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from vramfit.records.estimate import TimelinePoint
from vramfit.report.words import MEMORY, shorten_path, size

P = ParamSpec("P")

MIN_WIDTH = 8
EIGHTHS = " ▁▂▃▄▅▆▇█"
PART_STYLES = {"forward": "cyan", "backward": "blue", "optimizer": "cyan"}
SHORT_PARTS = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}
MIN_PLOT_WIDTH = 30
MAX_PLOT_WIDTH = 84
LABEL_WIDTH = 11


def grid(*columns: str | None, gap: int = 2, bar: int | None = None) -> Table:
    """An unframed table without a header.

    Args:
        columns: for each, how it is justified; None for one that wraps, "bar" for one that takes the width left.
        gap: spaces between columns.
        bar: the most characters of a bar.
    """
    made = Table.grid(padding=(0, gap, 0, 0), expand="bar" in columns)
    for column in columns:
        if column == "bar":
            made.add_column(ratio=1, min_width=MIN_WIDTH, max_width=bar)
        else:
            made.add_column(justify=column or "left", no_wrap=column is not None)  # type: ignore[arg-type]
    return made


def table(*columns: str, right: Sequence[str] = (), wraps: Sequence[str] = (), gap: int = 2) -> Table:
    """An unframed table with a header; columns in `right` hold numbers, those in `wraps` sentences."""
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=column not in wraps)
    return made


def facts(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Labels, dimmed, with what there is to say of each."""
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column()
    for row in rows:
        made.add_row(*row)
    return made


def marked(mark: str, text: str | Text, style: str) -> RenderableType:
    """A remark behind a mark; further lines hang below the text, not below the mark."""
    made = Table.grid(padding=(0, 1, 0, 0))
    made.add_row(Text(mark, style=style), Text(text) if isinstance(text, str) else text)
    return made


def indented(text: str, style: str = "dim") -> RenderableType:
    """A remark below what it is about."""
    return Padding(Text(text, style=style), (0, 0, 0, 2))


@dataclass(frozen=True)
class _ForWidth:
    """Lines that are made when the width they have is known."""

    make: Callable[[int], Iterator[RenderableType]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.make(options.max_width)


def for_width(
    make: Callable[Concatenate[int, P], Iterator[RenderableType]],
) -> Callable[P, RenderableType]:
    """Have a function called when its lines are drawn, with their width as its first argument."""

    @wraps(make)
    def later(*args: P.args, **keywords: P.kwargs) -> RenderableType:
        return _ForWidth(lambda width: make(width, *args, **keywords))

    return later


def with_paths(width: int, rows: Sequence[tuple[Sequence[str], str, str]], *, least: int) -> Table:
    """Rows of figures and a name, and as much of a module's path as there is room for.

    Args:
        rows: the texts of a row, the name last; the path; the style of the figures.
        least: the room from which paths are shown.
    """
    room = width - sum(max(map(len, column)) + 2 for column in zip(*(texts for texts, _, _ in rows), strict=True))
    made = grid(*["right"] * (len(rows[0][0]) - 1), "left", "left")
    for (*figures, name), path, style in rows:
        where = shorten_path(path, room) if room >= least else ""
        made.add_row(*(Text(f, style=style) for f in figures), Text(name), Text(where, style="dim"))
    return made


def has_colour(console: Console) -> bool:
    """Whether colours reach the reader."""
    return console.color_system is not None and not console.no_color


def category_mark(category: str, *, colour: bool) -> tuple[str, str]:
    """(character, style) that stands for a category."""
    kind = MEMORY[category]
    return ("█", kind.terminal) if colour else (kind.glyph, "")


@dataclass(frozen=True, kw_only=True)
class Meter:
    """A figure against a limit; a mark stands at the limit where the figure goes beyond it."""

    value: int
    limit: int
    scale: int
    """What the whole width stands for; at least `value` and `limit`."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width, 1)
        filled, limit = (round(width * n / self.scale) if self.scale else 0 for n in (self.value, self.limit))
        if self.value > self.limit:
            limit = min(limit, max(width - 2, 0))  # an excess is never too small to see
            filled = min(max(filled, limit + 2), width)
            yield Segment("▆" * limit + "┃" + "▆" * (filled - limit - 1), Style.parse("red"))
        else:
            filled = max(filled, 1) if self.value else 0
            yield Segment("▆" * filled, Style.parse("cyan"))
            yield Segment("▁" * (limit - filled), Style.parse("dim"))
        yield Segment(" " * (width - max(filled, limit)))


@dataclass(frozen=True)
class StackedBar:
    """Shares of a whole, side by side."""

    shares: Mapping[str, int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total = sum(self.shares.values())
        end, so_far = 0, 0
        for category, num_bytes in self.shares.items():
            so_far += num_bytes
            start, end = end, round(options.max_width * so_far / total) if total else 0
            glyph, style = category_mark(category, colour=has_colour(console))
            yield Segment(glyph * (end - start), Style.parse(style or "none"))
        yield Segment.line()


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Bytes over a step as columns, with the parts of the step beneath."""

    points: Sequence[TimelinePoint]
    height: int = 4

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = resample(self.points, options.max_width)
        top = max((p.allocated_bytes for p in columns), default=0)
        for row in reversed(range(self.height)):
            line = Text(no_wrap=True)
            for point in columns:
                level = ceil(point.allocated_bytes / top * self.height * 8) if top else 0
                glyph = EIGHTHS[min(max(level - 8 * row, 0), 8)]
                line.append(glyph, PART_STYLES.get(point.part, ""))
            yield line
        yield label_parts([p.part for p in columns])


def resample(points: Sequence[TimelinePoint], width: int) -> list[TimelinePoint]:
    """The points as exactly `width` columns, each the highest of its stretch: no peak is lost."""
    num = len(points)
    if not num:
        return []
    stretches = (points[i * num // width : max(-(-(i + 1) * num // width), i * num // width + 1)] for i in range(width))
    return [max(stretch, key=lambda point: point.allocated_bytes) for stretch in stretches]


def label_parts(parts: Sequence[str]) -> Text:
    """One line that names each run of columns as far as there is room: `├─ forward ─┤├─ backward ─┤`."""
    line = Text(no_wrap=True)
    for part, run in groupby(parts):
        line.append(_label(part, sum(1 for _ in run)), PART_STYLES.get(part, ""))
    return line


def _label(part: str, width: int) -> str:
    for name in (part, SHORT_PARTS.get(part, part[:3]), part[:1]):
        if width >= len(name) + 4:
            return "└" + f" {name} ".center(width - 2, "─") + "┘"
        if width >= len(name) + 2:
            return name.center(width)
    return part[:1] if width == 1 else part[:1].center(width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run."""

    seconds: float
    num_bytes: int
    mark: str
    style: str


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Points by seconds (to the right) and bytes (upwards), with a line at the limit.

    Later points lie over earlier ones.
    """

    points: Sequence[Point]
    limit_bytes: int
    x_label: str = "seconds a step"
    height: int = 9

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(min(options.max_width, MAX_PLOT_WIDTH) - LABEL_WIDTH - 3, MIN_PLOT_WIDTH)
        top = max([self.limit_bytes, *(p.num_bytes for p in self.points)])
        longest = max((p.seconds for p in self.points), default=0.0) or 1.0
        cells = [[(" ", "")] * width for _ in range(self.height)]
        limit_row = self._row(self.limit_bytes, top)
        cells[limit_row] = [("┄", "yellow")] * width
        for point in self.points:
            column = round(point.seconds / longest * (width - 1))
            cells[self._row(point.num_bytes, top)][column] = (point.mark, point.style)
        for row in reversed(range(self.height)):
            label = size(self.limit_bytes) if row == limit_row else size(top) if row == self.height - 1 else ""
            if row == self.height - 1 and limit_row == row - 1:
                label = ""  # two labels in neighbouring lines would be read as one
            line = Text(f"{label:>{LABEL_WIDTH}} ┤" if label else f"{'':>{LABEL_WIDTH}} │", no_wrap=True)
            for mark, style in cells[row]:
                line.append(mark, style)
            yield line
        yield Text(f"{'0':>{LABEL_WIDTH}} └{'─' * width}", no_wrap=True)
        end = f"{longest:.3g}"
        yield Text(" " * (LABEL_WIDTH + 2) + "0" + f"{self.x_label} {end}".rjust(width - 1), no_wrap=True)

    def _row(self, num_bytes: int, top: int) -> int:
        return min(round(num_bytes / top * (self.height - 1)), self.height - 1)
