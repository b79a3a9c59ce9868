"""A `LoadReport` for the terminal: what was loaded, what it took, what to know about it."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vramfit.records.load_report import LoadReport, LogitComparison
from vramfit.report.findings import render_findings
from vramfit.report.words import model_name
from vramfit.units import format_bytes

MAX_NAMES = 4


def render_load_report(report: LoadReport) -> RenderableType:
    """The facts of a load, then what its inspection found, then outputs compared."""
    lines: list[RenderableType] = [
        Text.assemble(
            (model_name(report.model), "bold"), f"  {report.model_class}, {_weights(report)}, on {report.device}"
        ),
        _facts(report),
    ]
    said = [finding for finding in report.findings if finding.severity != "ok"]
    if said:
        lines += [Text(""), render_findings(said)]
    if report.comparison is not None:
        lines += [Text(""), Text("Beside full precision", style="bold"), _comparison(report.comparison)]
    return Group(*lines)


def _weights(report: LoadReport) -> str:
    if report.quantize is None:
        return report.precision
    return f"{report.precision} with {report.num_quantized} linear layers in {report.quantize}"


def _facts(report: LoadReport) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, value in _rows(report):
        table.add_row(label, value)
    return table


def _rows(report: LoadReport) -> Iterator[tuple[str, str]]:
    if report.files:
        yield "read", f"{format_bytes(report.num_bytes)} in {report.num_tensors} tensors from {_names(report.files)}"
    else:
        yield "weights", "random, the same for the same seed"
    yield "time", f"{report.time_s:.2f} s"
    if report.final_device_bytes is not None and report.peak_device_bytes is not None:
        over = report.peak_device_bytes - report.final_device_bytes
        way = f"never more than {format_bytes(over)} above that on the way" if over else "never more on the way"
        yield "on the GPU", f"{format_bytes(report.final_device_bytes)}, {way}"
    if report.host_anonymous_bytes is not None:
        yield "on the host", f"{format_bytes(report.host_anonymous_bytes)} at most"
    if report.num_resident_layers < report.num_layers:
        waiting = report.num_layers - report.num_resident_layers
        yield "offloaded", f"{waiting} of {report.num_layers} layers wait in host memory and come for their turn"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


def _comparison(comparison: LogitComparison) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("samples", f"{comparison.num_sentences} {comparison.inputs}")
    table.add_row(
        "largest difference", f"{comparison.max_abs_difference:.3g} (outputs reach {comparison.max_abs_output:.3g})"
    )
    table.add_row("lowest cosine", f"{comparison.cosine:.6f}")
    if comparison.label_agreement is not None:
        table.add_row("same top label", f"{100 * comparison.label_agreement:.1f} %")
    return table
