"""A small plot of points for the terminal: memory against time."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from vramfit.report.words import size

MIN_WIDTH = 30
MAX_WIDTH = 84
LABEL_WIDTH = 11


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
        width = max(min(options.max_width, MAX_WIDTH) - LABEL_WIDTH - 3, MIN_WIDTH)
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

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(MIN_WIDTH, options.max_width)
