"""One job at many sizes for the terminal: a table over lengths and batches, what grows with the length and why, and the
largest batch that fits."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, Literal

from rich.console import RenderableType
from rich.text import Text

from vramfit.records.estimate import Estimate, MaxBatch, TensorGroup
from vramfit.report.charts import for_width, grid, marked, with_paths
from vramfit.report.estimate import Sized, four_figures, render_headline, render_peak, render_remarks, render_verdict
from vramfit.report.words import group_name, peak_moment, size
from vramfit.units import GIB, MIB

CELL_WIDTH = 9
"""`123.45 ✗` and a space on either side."""
MAX_NAMED = 8
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


def render_table(estimates: Sequence[Estimate], show: str = "allocated") -> RenderableType:
    """The table, what its marks mean, and what grew between the two greatest lengths.

    Args:
        show: `requested`, `allocated`, `reserved` or `process`.
    """
    parts: list[RenderableType] = [render_headline(estimates[0], batch=False, seq=False), Text()]
    parts += [_grid(estimates, show), *_key(estimates)]
    pair = lengths_to_compare(estimates)
    if pair is not None:
        parts += [Text(), *render_growth(*pair)]
    return Sized([*parts, Text(), *render_remarks(estimates[0])])


def lengths_to_compare(estimates: Sequence[Estimate]) -> tuple[Estimate, Estimate] | None:
    """The two greatest lengths, at the largest batch that fits at both, else at the smallest."""
    seqs = sorted({e.workload.seq for e in estimates})[-2:]
    if len(seqs) < 2:
        return None
    cells = {(e.workload.seq, e.workload.batch): e for e in estimates}
    pairs = [(cells[seqs[0], b], cells[seqs[1], b]) for b in sorted({e.workload.batch for e in estimates})]
    fitting = [pair for pair in pairs if all(e.fits is not False for e in pair)]
    return fitting[-1] if fitting else pairs[0]


@for_width
def _grid(width: int, estimates: Sequence[Estimate], show: str) -> Iterator[RenderableType]:
    """The figures in one unit; more batches than the width has room for go to further tables below."""
    peaks = {(e.workload.seq, e.workload.batch): getattr(e, f"peak_{show}_bytes") for e in estimates}
    unit, name = (GIB, "GiB") if max(peaks.values()) >= GIB else (MIB, "MiB")
    cells = {(e.workload.seq, e.workload.batch): e for e in estimates}
    seqs, batches = (sorted(set(sizes)) for sizes in zip(*cells, strict=True))
    num_columns = max(1, (width - CELL_WIDTH) // CELL_WIDTH)
    for start in range(0, len(batches), num_columns):
        shown = batches[start : start + num_columns]
        caption = f"Peak {show}, {name}; batch →" if not start else "… batch →"
        yield Text(caption, style="bold")
        rows = grid(*["right"] * (len(shown) + 1), gap=1)
        for column in rows.columns:
            column.min_width = CELL_WIDTH - 1
        rows.add_row(Text("length ↓", style="bold"), *(Text(f"{b:,}  ", style="bold") for b in shown))
        for seq in seqs:
            numbers = (_cell(cells[seq, b], f"{peaks[seq, b] / unit:,.{2 if unit == GIB else 0}f}") for b in shown)
            rows.add_row(Text(f"{seq:,}", style="bold"), *numbers)
        yield rows


def _cell(estimate: Estimate, number: str) -> Text:
    if estimate.fits is False:
        return Text(f"{number} ✗", style="red")
    if estimate.num_retries:
        return Text(f"{number} !", style="yellow")
    return Text(f"{number}  ", style="green" if estimate.fits else "")


def _key(estimates: Sequence[Estimate]) -> Iterator[RenderableType]:
    """What the marks mean, as far as there are any."""
    capacity = estimates[0].capacity_bytes
    if capacity is None:
        return
    not_fitting = sum(e.fits is False for e in estimates)
    gpu = f" on {estimates[0].gpu}" if estimates[0].gpu else ""
    if not_fitting:
        yield Text(f"✗ does not fit into the {size(capacity)} that PyTorch may reserve{gpu}", style="dim")
    else:
        yield Text(f"All fit into the {size(capacity)} that PyTorch may reserve{gpu}.", style="dim")
    if any(e.fits and e.num_retries for e in estimates):
        yield Text("! fits only because the allocator empties its cache and tries again", style="dim")


@dataclass(frozen=True, slots=True)
class Growth:
    """One group of blocks at two lengths."""

    group: TensorGroup
    """At the longer length, layer numbers left out."""
    before_bytes: int
    ratio: float
    """The longer length over the shorter."""

    @property
    def after_bytes(self) -> int:
        return self.group.allocated_bytes

    @property
    def grown_bytes(self) -> int:
        return self.after_bytes - self.before_bytes

    @property
    def law(self) -> Law:
        return law_of(self.before_bytes, self.after_bytes, self.ratio)

    def split(self) -> list[tuple[Law, int, int]]:
        """Law, bytes before and after; a mixed group as the two parts that give its size at both lengths."""
        if self.law != "mixed":
            return [(self.law, self.before_bytes, self.after_bytes)]
        slow: Law = "length" if self.after_bytes > self.ratio * self.before_bytes else "constant"
        fast: Law = "square" if slow == "length" else "length"
        # before = s + f; after = s·slow_factor + f·ratio·slow_factor
        slow_factor = self.ratio if slow == "length" else 1.0
        fast_before = round((self.after_bytes / slow_factor - self.before_bytes) / (self.ratio - 1))
        slow_before = self.before_bytes - fast_before
        slow_after = round(slow_before * slow_factor)
        return [(slow, slow_before, slow_after), (fast, fast_before, self.after_bytes - slow_after)]


def compare_lengths(before: Estimate, after: Estimate) -> list[Growth]:
    """What grew between two estimates of the same job at two lengths, the shorter first; the most grown first."""
    ratio = after.workload.seq / before.workload.seq
    if ratio <= 1:
        raise ValueError(f"length {after.workload.seq} is not longer than {before.workload.seq}")
    old, new = _by_place(before), _by_place(after)
    grown = [
        Growth(
            TensorGroup(category=c, operator=o, module=m, num_blocks=0, allocated_bytes=new.get((c, o, m), 0)),
            old.get((c, o, m), 0),
            ratio,
        )
        for c, o, m in old | new
    ]
    return sorted(grown, key=lambda g: -g.grown_bytes)


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


def by_law(groups: Sequence[Growth]) -> dict[Law, tuple[int, int]]:
    """Law → bytes before and after, of all that follows it."""
    sums: defaultdict[Law, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for law, before, after in (part for group in groups for part in group.split()):
        sums[law] = (sums[law][0] + before, sums[law][1] + after)
    return dict(sums)


def _by_place(estimate: Estimate) -> dict[tuple[Any, str, str], int]:
    """Bytes by category, operator and module; a temporary of layer 11 at one length is one of layer 0 at another."""
    sums: defaultdict[tuple[Any, str, str], int] = defaultdict(int)
    for group in estimate.groups:
        module = ".".join("*" if part.isdigit() else part for part in group.module.split("."))
        sums[group.category, group.operator, module] += group.allocated_bytes
    return dict(sums)


def render_growth(before: Estimate, after: Estimate) -> Iterator[RenderableType]:
    """The sums, the groups that grew most, and the law behind each."""
    groups = compare_lengths(before, after)
    laws = by_law(groups)
    lengths = f"From {before.workload.seq:,} to {after.workload.seq:,} tokens at batch {after.workload.batch:,}"
    yield Text.assemble((lengths, "bold"), f": {_step(before.peak_allocated_bytes, after.peak_allocated_bytes)}")
    constant = laws.get("constant", (0, 0))[0]
    rest = (before.peak_allocated_bytes - constant, after.peak_allocated_bytes - constant)
    if constant and rest[0] > 0:
        yield Text(f"Without the {size(constant)} that stay: {_step(*rest)}.")
    if (before.peak.phase, before.peak.part) != (after.peak.phase, after.peak.part):
        moments = [peak_moment(e.peak, e.workload) for e in (before, after)]
        yield Text(f"The peak moved: {moments[0]} at first, {moments[1]} now.", style="yellow")
    yield _grown([g for g in groups if g.grown_bytes > 0][:MAX_GROUPS])
    yield Text("Memory grows", style="bold")
    rows = grid("right", "right", "right", None)
    for law, reason in REASONS.items():
        if law in laws:
            old, new = laws[law]
            rows.add_row(f"×{new / old:.2f}" if old and new else "", size(old), f"→ {size(new):>10}", Text(reason))
    yield rows


def _step(before_bytes: int, after_bytes: int) -> str:
    return f"{size(before_bytes)} → {size(after_bytes)}, {after_bytes / before_bytes:.2f} times as much"


@for_width
def _grown(width: int, groups: Sequence[Growth]) -> Iterator[RenderableType]:
    """The groups that grew most, in bytes."""
    rows = []
    for g in groups:
        times = f"×{g.after_bytes / g.before_bytes:.2f}" if g.before_bytes else "new"
        sizes = f"+{size(g.grown_bytes)}", size(g.before_bytes), f"→ {size(g.after_bytes):>10}"
        rows.append(((*sizes, times, group_name(g.group)), g.group.module, "red" if g.law == "square" else ""))
    if rows:
        yield with_paths(width, rows, least=MIN_PATH)


def render_max_batch(found: MaxBatch) -> RenderableType:
    """The answer first, then the estimate at that batch in short."""
    e = found.estimate
    parts: list[RenderableType] = [render_headline(e, batch=False), Text(), *_answer(found), Text()]
    parts += [four_figures(e), Text(), *render_peak(e), Text(), *render_remarks(e)]
    return Sized(parts)


def _answer(found: MaxBatch) -> Iterator[RenderableType]:
    if not found.batch:
        yield render_verdict(found.estimate, "Not even one sample fits")
    else:
        yield Text(f"Largest batch: {found.batch:,}{with_margin(found)}", style="bold green")
        yield render_verdict(found.estimate, says_cold=False)
    if found.margin_reason:
        yield marked("·", f"The headroom of plans: {found.margin_reason}.", "dim")
    if found.usual_batch is not None:
        lower = f"fp32 is only the default: --precision {found.usual_precision}, the usual one here,"
        yield marked("→", f"{lower} allows {found.usual_batch:,} with the same headroom.", "cyan")
    if found.cold_batch < found.batch:
        yield marked(
            "!",
            f"{found.cold_batch:,} where the workload's own first matrix product starts cuBLAS: run a small one before "
            f"the model comes to the GPU to get {found.batch:,}.",
            "yellow",
        )
    if found.limited_by:
        yield marked("→", f"What limits it: {found.limited_by.rstrip('.')}.", "cyan")
    if found.not_fitting:
        yield marked(
            "!",
            f"Not {name_batches(found.not_fitting)}, although {found.batch:,} fits: memory is more fragmented there.",
            "yellow",
        )


def with_margin(found: MaxBatch) -> str:
    """Behind the largest batch that fits: the largest that leaves the headroom that plans keep."""
    if found.margin_batch is None:
        return ""
    batch = f"{found.margin_batch:,}" if found.margin_batch else "not even one"
    return f", or {batch} with the headroom that plans keep"


def name_batches(batches: Sequence[int]) -> str:
    """Numbers as people list them: runs as ranges, and not more than a line of them.

    >>> name_batches([3, 5, 6, 7, 9])
    '3, 5–7 and 9'
    """
    runs: list[list[int]] = []
    for batch in sorted(batches):
        if runs and batch == runs[-1][-1] + 1:
            runs[-1].append(batch)
        else:
            runs.append([batch])
    names = [f"{run[0]:,}" if len(run) == 1 else f"{run[0]:,}–{run[-1]:,}" for run in runs]
    if len(names) > MAX_NAMED:
        names = [*names[: MAX_NAMED - 1], f"{len(names) - MAX_NAMED + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
