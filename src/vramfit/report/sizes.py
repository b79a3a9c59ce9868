"""One job at many sizes for the terminal: a table over lengths and batches, and the largest batch that fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from vramfit.records.estimate import Estimate, MaxBatch
from vramfit.report.estimate import Figures, Sized, marked, render_headline, render_peak, render_remarks, render_verdict
from vramfit.report.growth import compare_lengths, render_growth
from vramfit.report.words import size
from vramfit.units import GIB, MIB

CELL_WIDTH = 9
"""`123.45 ✗` and a space on either side."""
MAX_NAMED = 8


def render_table(estimates: Sequence[Estimate], show: str = "allocated") -> RenderableType:
    """The table, what its marks mean, and what grew between the two greatest lengths.

    Args:
        show: `requested`, `allocated`, `reserved` or `process`.
    """
    parts: list[RenderableType] = [render_headline(estimates[0], batch=False, seq=False), Text()]
    parts += [_Grid(estimates, show), *_key(estimates)]
    pair = lengths_to_compare(estimates)
    if pair is not None:
        parts += [Text(), *render_growth(compare_lengths(*pair))]
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


@dataclass(frozen=True)
class _Grid:
    """The figures in one unit; more batches than the width has room for go to further tables below."""

    estimates: Sequence[Estimate]
    show: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seqs = sorted({e.workload.seq for e in self.estimates})
        batches = sorted({e.workload.batch for e in self.estimates})
        unit, name = (GIB, "GiB") if max(map(self._bytes, self.estimates)) >= GIB else (MIB, "MiB")
        num_columns = max(1, (options.max_width - CELL_WIDTH) // CELL_WIDTH)
        cells = {(e.workload.seq, e.workload.batch): self._cell(e, unit) for e in self.estimates}
        for start in range(0, len(batches), num_columns):
            shown = batches[start : start + num_columns]
            caption = f"Peak {self.show}, {name}; batch →" if not start else "… batch →"
            yield Text(caption, style="bold")
            grid = Table.grid(padding=(0, 1, 0, 0))
            grid.add_column("", justify="right", no_wrap=True, min_width=CELL_WIDTH - 1)
            for _ in shown:
                grid.add_column(justify="right", no_wrap=True, min_width=CELL_WIDTH - 1)
            grid.add_row(Text("length ↓", style="bold"), *(Text(f"{b:,}  ", style="bold") for b in shown))
            for seq in seqs:
                grid.add_row(Text(f"{seq:,}", style="bold"), *(cells[seq, b] for b in shown))
            yield grid

    def _bytes(self, estimate: Estimate) -> int:
        return int(getattr(estimate, f"peak_{self.show}_bytes"))

    def _cell(self, estimate: Estimate, unit: int) -> Text:
        number = f"{self._bytes(estimate) / unit:,.2f}" if unit == GIB else f"{self._bytes(estimate) / unit:,.0f}"
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


def render_max_batch(found: MaxBatch) -> RenderableType:
    """The answer first, then the estimate at that batch in short."""
    e = found.estimate
    parts: list[RenderableType] = [render_headline(e, batch=False), Text(), *_answer(found), Text()]
    parts += [Figures(e), Text(), *render_peak(e), Text(), *render_remarks(e)]
    return Sized(parts)


def _answer(found: MaxBatch) -> Iterator[RenderableType]:
    if not found.batch:
        yield render_verdict(found.estimate, "Not even one sample fits")
    else:
        yield Text(f"Largest batch: {found.batch:,}{with_margin(found)}", style="bold green")
        yield render_verdict(found.estimate, says_cold=False)
    if found.margin_reason:
        yield marked("·", f"The margin of plans: {found.margin_reason}.", "dim")
    if found.usual_batch is not None:
        lower = f"fp32 is only the default: --precision {found.usual_precision}, the usual one here,"
        yield marked("→", f"{lower} allows {found.usual_batch:,} with the same margin.", "cyan")
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
    """Behind the largest batch that fits: the largest that leaves the margin that plans keep."""
    if found.margin_batch is None:
        return ""
    batch = f"{found.margin_batch:,}" if found.margin_batch else "not even one"
    return f", or {batch} with the margin that plans keep"


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
