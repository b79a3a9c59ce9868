"""The answer to "twice the length: which tensors grew, and why more than twofold?" for the terminal."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from vramfit.records.estimate import TensorGroup
from vramfit.report.growth import GroupGrowth, Growth, Law
from vramfit.report.words import group_name, peak_moment, shorten_path, size

MAX_GROUPS = 6
MIN_PATH = 16
REASONS: dict[Law, str] = {
    "square": "as length²: every token attends to each other",
    "length": "as length: one row for every token",
    "constant": "not at all: weights and the like",
    "new": "live at the longer length's peak only",
    "gone": "live at the shorter length's peak only",
}


def render_growth(growth: Growth) -> Iterator[RenderableType]:
    """The sums, the groups that grew most, and the law behind each."""
    before, after = growth.before, growth.after
    lengths = f"From {before.workload.seq:,} to {after.workload.seq:,} tokens at batch {after.workload.batch:,}"
    yield Text.assemble((lengths, "bold"), f": {_step(before.peak_allocated_bytes, after.peak_allocated_bytes)}")
    constant = growth.by_law.get("constant", (0, 0))[0]
    rest = (before.peak_allocated_bytes - constant, after.peak_allocated_bytes - constant)
    if constant and rest[0] > 0:
        yield Text(f"Without the {size(constant)} that stay: {_step(*rest)}.")
    if not growth.same_moment:
        moments = [peak_moment(e.peak, e.workload) for e in (before, after)]
        yield Text(f"The peak moved: {moments[0]} at first, {moments[1]} now.", style="yellow")
    yield _Grown(tuple(g for g in growth.groups if g.grown_bytes > 0)[:MAX_GROUPS])
    yield Text("Memory grows", style="bold")
    yield _laws(growth)


def _step(before_bytes: int, after_bytes: int) -> str:
    return f"{size(before_bytes)} → {size(after_bytes)}, {after_bytes / before_bytes:.2f} times as much"


def _laws(growth: Growth) -> RenderableType:
    """One line a law: factor, bytes before and after, and the reason."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "right", "right"):
        grid.add_column(justify=justify, no_wrap=True)
    grid.add_column()
    for law, reason in REASONS.items():
        if law in growth.by_law:
            before, after = growth.by_law[law]
            factor = f"×{after / before:.2f}" if before and after else ""
            grid.add_row(factor, size(before), f"→ {size(after):>10}", Text(reason))
    return grid


@dataclass(frozen=True)
class _Grown:
    """The groups that grew most, in bytes."""

    groups: tuple[GroupGrowth, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = [
            (
                f"+{size(g.grown_bytes)}",
                size(g.before_bytes),
                f"→ {size(g.after_bytes):>10}",
                "new" if g.factor is None else f"×{g.factor:.2f}",
                _name(g),
            )
            for g in self.groups
        ]
        if not shown:
            return
        room = options.max_width - sum(max(map(len, column)) + 2 for column in zip(*shown, strict=True))
        grid = Table.grid(padding=(0, 2, 0, 0))
        for justify in ("right", "right", "right", "right", "left", "left"):
            grid.add_column(justify=justify, no_wrap=True)
        for group, (*figures, name) in zip(self.groups, shown, strict=True):
            where = shorten_path(group.module, room) if room >= MIN_PATH else ""
            style = "red" if group.law == "square" else ""
            grid.add_row(*(Text(f, style=style) for f in figures), Text(name), Text(where, style="dim"))
        yield grid


def _name(group: GroupGrowth) -> str:
    return group_name(
        TensorGroup(
            category=group.category,
            operator=group.operator,
            module=group.module,
            num_blocks=0,
            allocated_bytes=group.after_bytes,
        )
    )
