"""What is in memory at the peak: a stacked bar by category, its legend, and the largest groups of blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from vramfit.records.estimate import CATEGORIES, Estimate
from vramfit.report.bars import MIN_WIDTH, StackedBar, category_mark, has_colour
from vramfit.report.words import group_name, peak_moment, peak_place, percent, shorten_path, size

MAX_GROUPS = 6


def render_peak(estimate: Estimate) -> Iterator[RenderableType]:
    """What is in memory at the peak, and the moment of it."""
    shares: dict[str, int] = {category: estimate.breakdown.get(category, 0) for category in CATEGORIES}
    when = peak_moment(estimate.peak, estimate.workload)
    yield Text.assemble(("At the peak", "bold"), f": {size(sum(shares.values()))} allocated, {when}")
    yield StackedBar(shares)
    yield _Legend(shares)
    place = peak_place(estimate.peak)
    if place:
        yield Text(place, style="dim")


@dataclass(frozen=True)
class _Legend:
    """Each category with its mark, size and share; in as many columns as fit."""

    shares: dict[str, int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total = sum(self.shares.values())
        present = [(name, num_bytes) for name, num_bytes in self.shares.items() if num_bytes]
        cells = []
        for name, num_bytes in present:
            glyph, style = category_mark(name, colour=has_colour(console))
            text = f" {name:<12}{size(num_bytes):>11} {percent(num_bytes, total):>5}"
            cells.append(Text.assemble((glyph * 2, style), text, no_wrap=True))
        num_columns = max(1, min(3, (options.max_width + 4) // 37))
        num_rows = ceil(len(cells) / num_columns)
        grid = Table.grid(padding=(0, 4, 0, 0))
        for row in range(num_rows):
            grid.add_row(*cells[row::num_rows])
        yield grid


@dataclass(frozen=True)
class Largest:
    """The largest groups of blocks at the peak: what they are and where they come from."""

    estimate: Estimate

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        groups = self.estimate.groups[:MAX_GROUPS]
        if not groups:
            return
        yield Text("Largest at the peak", style="bold")
        shown = [
            (
                size(g.allocated_bytes),
                percent(g.allocated_bytes, self.estimate.peak_allocated_bytes),
                f"{g.num_blocks:,} ×",
                group_name(g),
            )
            for g in groups
        ]
        room = options.max_width - sum(max(map(len, column)) + 2 for column in zip(*shown, strict=True))
        grid = Table.grid(padding=(0, 2, 0, 0))
        for justify in ("right", "right", "right", "left", "left"):
            grid.add_column(justify=justify, no_wrap=True)
        for group, (*figures, name) in zip(groups, shown, strict=True):
            where = shorten_path(group.module, room) if room >= MIN_WIDTH else ""
            grid.add_row(*figures, Text(name), Text(where, style="dim"))
        yield grid
