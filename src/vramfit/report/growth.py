"""What grows with the length of the sequences, and why more than twofold: two estimates compared, for the terminal."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from vramfit.records.estimate import Category, Estimate, TensorGroup
from vramfit.report.words import group_name, peak_moment, shorten_path, size

Law = Literal["square", "mixed", "length", "constant", "new", "gone"]
"""How a group follows the length; `new` and `gone`: it is live at only one of the two peaks."""

_TOLERANCE = 0.1
"""Exponents this near to 0, 1 or 2 are taken for it: blocks are rounded up."""
MAX_GROUPS = 6
MIN_PATH = 16
REASONS: dict[Law, str] = {
    "square": "as length²: every token attends to each other",
    "length": "as length: one row for every token",
    "constant": "not at all: weights and the like",
    "new": "live at the longer length's peak only",
    "gone": "live at the shorter length's peak only",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupGrowth:
    """One group of blocks at two lengths."""

    category: Category
    operator: str
    module: str
    before_bytes: int
    after_bytes: int
    law: Law

    @property
    def grown_bytes(self) -> int:
        return self.after_bytes - self.before_bytes

    @property
    def factor(self) -> float | None:
        return self.after_bytes / self.before_bytes if self.before_bytes else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Two estimates that differ in their length alone."""

    before: Estimate
    after: Estimate
    groups: tuple[GroupGrowth, ...]
    """The most grown first."""

    @property
    def by_law(self) -> Mapping[Law, tuple[int, int]]:
        """Law → bytes before and after, of all that follows it; a mixed group is split between its two laws."""
        ratio = self.after.workload.seq / self.before.workload.seq
        sums: defaultdict[Law, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for group in self.groups:
            for law, before, after in _split(group, ratio):
                sums[law] = (sums[law][0] + before, sums[law][1] + after)
        return dict(sums)

    @property
    def same_moment(self) -> bool:
        """Whether both peaks come in the same part of the same phase, so that like is compared with like."""
        return (self.before.peak.phase, self.before.peak.part) == (self.after.peak.phase, self.after.peak.part)


def compare_lengths(before: Estimate, after: Estimate) -> Growth:
    """What grew between two estimates of the same job at two lengths, the shorter first."""
    ratio = after.workload.seq / before.workload.seq
    if ratio <= 1:
        raise ValueError(f"length {after.workload.seq} is not longer than {before.workload.seq}")
    old, new = _by_place(before), _by_place(after)
    grown = [
        GroupGrowth(
            category=place[0],
            operator=place[1],
            module=place[2],
            before_bytes=old.get(place, 0),
            after_bytes=new.get(place, 0),
            law=law_of(old.get(place, 0), new.get(place, 0), ratio),
        )
        for place in old | new
    ]
    return Growth(before=before, after=after, groups=tuple(sorted(grown, key=lambda g: -g.grown_bytes)))


def law_of(before_bytes: int, after_bytes: int, ratio: float) -> Law:
    """How a size follows the length when the length grows `ratio`-fold.

    >>> law_of(100, 400, 2.0), law_of(100, 200, 2.0), law_of(100, 100, 2.0), law_of(100, 300, 2.0)
    ('square', 'length', 'constant', 'mixed')
    """
    if not before_bytes or not after_bytes:
        return "gone" if before_bytes else "new"
    exponent = log(after_bytes / before_bytes) / log(ratio)
    if exponent < _TOLERANCE:
        return "constant"
    if abs(exponent - 1) <= _TOLERANCE:
        return "length"
    return "square" if exponent >= 2 - _TOLERANCE else "mixed"


def _split(group: GroupGrowth, ratio: float) -> list[tuple[Law, int, int]]:
    """A mixed group as the two parts that give its size at both lengths; any other as it is."""
    if group.law != "mixed":
        return [(group.law, group.before_bytes, group.after_bytes)]
    slow: Law = "length" if group.after_bytes > ratio * group.before_bytes else "constant"
    fast: Law = "square" if slow == "length" else "length"
    # before = s + f; after = s·slow_factor + f·ratio·slow_factor
    slow_factor = ratio if slow == "length" else 1.0
    fast_before = round((group.after_bytes / slow_factor - group.before_bytes) / (ratio - 1))
    slow_before = group.before_bytes - fast_before
    slow_after = round(slow_before * slow_factor)
    return [(slow, slow_before, slow_after), (fast, fast_before, group.after_bytes - slow_after)]


def _by_place(estimate: Estimate) -> dict[tuple[Category, str, str], int]:
    sums: defaultdict[tuple[Category, str, str], int] = defaultdict(int)
    for group in estimate.groups:
        sums[group.category, group.operator, _anywhere(group.module)] += group.allocated_bytes
    return dict(sums)


def _anywhere(module: str) -> str:
    """A path without layer numbers: a temporary of layer 11 at one length is one of layer 0 at another."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


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
