"""The largest batch for the terminal: the number, what it leaves, and what stops the next one."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from vramfit.records.estimate import MaxBatch
from vramfit.report.estimate import Figures, Sized, marked, render_headline, render_remarks, render_verdict
from vramfit.report.peak import render_peak

MAX_NAMED = 8


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
