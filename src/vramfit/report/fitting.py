"""A fitted Trainer for the terminal: what fits, what was changed, and why."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vramfit.records.fitting import Fitting
from vramfit.units import format_bytes


def render_fitting(fitting: Fitting) -> RenderableType:
    """The verdict, a table of changes, and remarks."""
    return Group(*_parts(fitting))


def _parts(fitting: Fitting) -> Iterator[RenderableType]:
    plan = fitting.plan
    used, budget = fitting.most_bytes, plan.budget_bytes
    yield Text(f"{fitting.trainer} · {fitting.model}", style="bold")
    yield Text(
        f"✓ Fits: at most {format_bytes(used)} of {format_bytes(budget)} in training, "
        f"{format_bytes(plan.evaluation.safe_reserved_bytes)} in evaluation.",
        style="bold green",
    )
    yield Text(f"  Every step learns from {plan.workload.batch} samples as before, {_passes(fitting)}.")
    if fitting.changes:
        yield _table(fitting)
    for note in fitting.notes:
        yield Text.assemble(("· ", "cyan"), note)


def _passes(fitting: Fitting) -> str:
    plan = fitting.plan
    if plan.workload.attention == "packed":
        return f"in passes of up to {plan.micro_batch * plan.workload.seq:,} tokens, without padding"
    return "all in one pass" if plan.accumulate == 1 else f"in {plan.accumulate} passes of at most {plan.micro_batch}"


def _table(fitting: Fitting) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("Changed", no_wrap=True)
    table.add_column("from")
    table.add_column("to")
    table.add_column("Why")
    for change in fitting.changes:
        table.add_row(change.name, change.before, change.after, change.why)
    return table
