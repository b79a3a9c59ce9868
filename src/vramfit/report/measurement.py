"""A prediction beside its measurement for the terminal: a line a figure, the error, and a verdict."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vramfit.records.measurement import Comparison, Measurement, PhaseDifference
from vramfit.report.words import job, model_name, phase_name, size
from vramfit.units import format_bytes

COLUMNS = ("", "", "predicted", "measured", "error", "")


def render_comparison(comparison: Comparison) -> RenderableType:
    """What ran, predicted beside measured for every phase, and whether they agree."""
    m = comparison.measurement
    headline = Text.assemble((model_name(m.workload.model), "bold"), f"  {', '.join(job(m.workload))}")
    machine = Text(f"{m.gpu}, torch {m.torch_version}, transformers {m.transformers_version}", style="dim")
    return Group(headline, machine, Text(), _table(comparison), Text(), *_remarks(comparison))


def _table(comparison: Comparison) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    shown = ""
    for difference in comparison.differences:
        phase = phase_name(difference.phase, comparison.measurement.workload)
        style = _style(difference, comparison.tolerance)
        table.add_row(
            "" if phase == shown else phase,
            difference.figure,
            size(difference.predicted_bytes),
            size(difference.measured_bytes),
            Text(_signed(difference.error_bytes), style=style),
            Text(_percent(difference.error), style=style),
        )
        shown = phase
    return table


def _style(difference: PhaseDifference, tolerance: float) -> str:
    if not difference.error_bytes:
        return "green"
    return "yellow" if abs(difference.error) <= tolerance else "red"


def _signed(error_bytes: int) -> str:
    return "exact" if not error_bytes else ("+" if error_bytes > 0 else "") + format_bytes(error_bytes)


def _percent(error: float) -> str:
    return "" if not error else f"{100 * error:+.3f} %"


def _remarks(comparison: Comparison) -> Iterator[RenderableType]:
    m = comparison.measurement
    if m.out_of_memory is not None:
        said = {True: "that it fits", False: "that it does not fit", None: "nothing about fitting"}
        yield Text(f"Out of memory; the prediction said {said[comparison.predicted_fits]}.", style="bold red")
        yield Text(m.out_of_memory, style="dim")
    if comparison.differences:
        yield _verdict(comparison)
    facts = list(_facts(m))
    if facts:
        yield Text(", ".join(facts) + ".", style="dim")
    if comparison.basis == "derived":
        yield Text(
            "This GPU and torch release were not compared before: rules measured on others are carried over.",
            style="dim",
        )


def _verdict(comparison: Comparison) -> Text:
    worst, tolerance = comparison.worst_error, comparison.tolerance
    if not worst:
        return Text("Allocated and reserved are predicted to the byte.", style="bold green")
    if worst <= tolerance:
        return Text(f"Within {100 * tolerance:g} %: the worst is off by {100 * worst:.3f} %.", style="green")
    return Text(f"Off by {100 * worst:.3f} %, more than the {100 * tolerance:g} % allowed.", style="bold red")


def _facts(m: Measurement) -> Iterator[str]:
    if m.step_time_s is not None:
        yield f"{1000 * m.step_time_s:.1f} ms a {'step' if m.workload.trains else 'batch'}"
    if m.process_bytes is not None and m.context_bytes is not None:
        yield f"the process held {size(m.process_bytes)}, {size(m.context_bytes)} of them CUDA's own"
    if m.num_retries:
        yield f"the allocator freed its cache and tried again {m.num_retries} times"
