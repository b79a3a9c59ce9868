"""A `RunRecord` for the terminal: what was trained, what it reached, what it took beside what was predicted."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vramfit.records.run import EvaluationResult, RunRecord
from vramfit.report.words import model_name, reserved_peak
from vramfit.tasks import find_task
from vramfit.units import counted

MAX_EVALUATIONS = 12


def render_run(record: RunRecord) -> RenderableType:
    """The facts of a run, its evaluations, and where the model is."""
    lines: list[RenderableType] = [
        Text.assemble(
            (model_name(record.model), "bold"), f"  {record.model_class}, on {record.device}, {record.status}"
        ),
        _facts(record),
    ]
    if record.evaluations:
        lines += [Text(""), _evaluations(record.evaluations)]
    lines += [Text(""), Text.assemble("Saved in ", (record.output, "bold"))]
    return Group(*lines)


def metrics_in_words(metrics: Mapping[str, Any]) -> str:
    """Figures of an evaluation in one line."""
    return ", ".join(f"{name} {figure(value)}" for name, value in metrics.items() if isinstance(value, int | float))


def figure(value: Any) -> str:
    """A number as people read it."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def render_metrics(metrics: Mapping[str, Any]) -> Table:
    """One row a metric, and one a note; what else is no number is left to JSON."""
    table = _plain_table()
    for name, value in metrics.items():
        if isinstance(value, int | float):
            table.add_row(name, figure(value))
    for note in metrics.get("notes", ()):
        table.add_row("note", Text(note))
    return table


def _plain_table() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


def _facts(record: RunRecord) -> Table:
    table = _plain_table()
    for label, value in _rows(record):
        table.add_row(label, value)
    return table


def _rows(r: RunRecord) -> Iterator[tuple[str, str]]:
    how = "read in windows" if find_task(r.task).reads_windows else "cut"
    cut = f"; {counted(r.num_truncated, 'row')} too long, and {how}" if r.num_truncated else ""
    left_out = f"; {counted(r.num_bad_rows, 'row')} left out" if r.num_bad_rows else ""
    yield "data", f"{counted(r.num_samples, 'sample')}{cut}{left_out}"
    yield "settings", ", ".join(f"{name} {value}" for name, value in r.settings.items())
    epochs = counted(r.num_epochs, "epoch")
    yield "steps", f"{r.num_steps:,} in {epochs}, {r.tokens_per_s:,.0f} tokens/s, {_seconds(r.time_s)}"
    if r.compile_s:
        yield "compiling", f"{_seconds(r.compile_s)} before the first step, counted in"
    if r.device.startswith("cuda") and r.predicted_step_time_s is not None and r.step_time_s is not None:
        yield "a step", f"{_seconds(r.step_time_s)}; predicted {_seconds(r.predicted_step_time_s)}"
    if r.measured_reserved_bytes is not None:
        yield "reserved peak", reserved_peak(r)
    if r.num_recoveries:
        yield (
            "recoveries",
            f"{r.num_recoveries:,}: memory ran out and nothing was lost; micro-batch {r.final_micro_batch}",
        )
    if r.loss_scale is not None:
        yield "fp16", f"loss scale {r.loss_scale:g}, {counted(r.num_skipped, 'step')} skipped"
    if r.train_loss is not None:
        last = {0: "batches", 1: "batch"}.get(r.num_loss_batches, f"{r.num_loss_batches:,} batches")
        yield "training loss", f"{r.train_loss:.4f} over the last {last}"
    if r.best_value is not None:
        yield "best", f"{r.best_metric} {r.best_value:.4f} at step {r.best_step:,}; its weights are saved"
    for note in r.notes:
        yield "note", note


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f} min {rest:.0f} s" if minutes else f"{rest:.2f} s"


def _evaluations(results: tuple[EvaluationResult, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    shown = results[-MAX_EVALUATIONS:]
    names = [name for name, value in shown[-1].metrics.items() if isinstance(value, int | float)]
    for column in ("step", "epoch", *names):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for result in shown:
        figures = [figure(result.metrics.get(name, float("nan"))) for name in names]
        table.add_row(f"{result.step:,}", f"{result.epoch:.2f}", *figures, "best so far" if result.is_best else "")
    return table
