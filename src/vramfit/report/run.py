"""What was done, for the terminal: a model loaded, a Trainer fitted into a budget, a run with its evaluations, and a
measurement beside its prediction; and receipts, one line each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vramfit.records.finding import LoadReport, LogitComparison
from vramfit.records.measurement import Comparison, Measurement, PhaseDifference
from vramfit.records.plan import Fitting
from vramfit.records.receipt import NUM_NEEDED, Receipt, measured_pairs
from vramfit.records.run import EvaluationResult, RunRecord
from vramfit.report.charts import facts, table
from vramfit.report.findings import render_findings
from vramfit.report.words import job, model_name, phase_name, reserved_peak, size
from vramfit.settings import SETTINGS, chosen_in_words
from vramfit.tasks import find_task
from vramfit.units import counted, format_bytes
from vramfit.workload import Workload

MAX_EVALUATIONS = 12
MAX_NAMES = 4
MODEL_WIDTH = 24


def render_run(record: RunRecord) -> RenderableType:
    """The facts of a run, its evaluations, and where the model is."""
    lines: list[RenderableType] = [
        Text.assemble(
            (model_name(record.model), "bold"), f"  {record.model_class}, on {record.device}, {record.status}"
        ),
        facts(_run_rows(record)),
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


MOST_OF_EACH = 20
"""Labels that are shown."""


def render_metrics(metrics: Mapping[str, Any]) -> Table:
    """One row a metric, and one a note; what else is no number is left to JSON.

    Where vectors were cut to some lengths (`dims`), a metric's figures for these stand beside it; those of each label
    (`label_f1`) and of each of several numbers (`values`) below.
    """
    dims = metrics.get("dims", {})

    def beside(name: str) -> str:
        cut = [f"{figure(of[name])} at {dim}" for dim, of in dims.items() if name in of]
        return f"  ({', '.join(cut)})" if cut else ""

    figures = [(n, figure(value) + beside(n)) for n, value in metrics.items() if isinstance(value, int | float)]
    figures += list(_each(metrics))
    return facts([*figures, *(("note", Text(note)) for note in metrics.get("notes", ()))])


def _each(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What was found of each label or number, of the first of many."""
    labels, values, least = (metrics.get(name, {}) for name in ("label_f1", "values", "thresholds"))
    rows = [(f"f1 of {name}", f"{figure(f1)}, given from {least[name]:.3g} on") for name, f1 in labels.items()]
    rows += [(name, metrics_in_words(own)) for name, own in values.items()]
    yield from rows[:MOST_OF_EACH]
    if len(rows) > MOST_OF_EACH:
        yield "", f"and {len(rows) - MOST_OF_EACH:,} more: --json"


def _shown(name: str, value: Any) -> str:
    return SETTINGS[name].shown(value) if name in SETTINGS else str(value)


def _run_rows(r: RunRecord) -> Iterator[tuple[str, str]]:
    how = "read in windows" if find_task(r.task).reads_windows else "cut"
    cut = f"; {counted(r.num_truncated, 'row')} too long, and {how}" if r.num_truncated else ""
    left_out = f"; {counted(r.num_bad_rows, 'row')} left out" if r.num_bad_rows else ""
    yield "data", f"{counted(r.num_samples, 'sample')}{cut}{left_out}"
    if r.teacher is not None:
        yield "teacher", r.teacher
    yield "settings", ", ".join(f"{name} {_shown(name, value)}" for name, value in r.settings.items())
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
    yield from (("changed", change.said) for change in r.changes)
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
    shown = results[-MAX_EVALUATIONS:]
    names = [name for name, value in shown[-1].metrics.items() if isinstance(value, int | float)]
    numbers = ("step", "epoch", *names)
    rows = table(*numbers, "", right=numbers)
    for result in shown:
        figures = [figure(result.metrics.get(name, float("nan"))) for name in names]
        rows.add_row(f"{result.step:,}", f"{result.epoch:.2f}", *figures, "best so far" if result.is_best else "")
    return rows


def render_load_report(report: LoadReport) -> RenderableType:
    """The facts of a load, then what its inspection found, then outputs compared."""
    lines: list[RenderableType] = [
        Text.assemble(
            (model_name(report.model), "bold"), f"  {report.model_class}, {report.weights_in_words}, on {report.device}"
        ),
        facts(_load_rows(report)),
    ]
    said = [finding for finding in report.findings if finding.severity != "ok"]
    if said:
        lines += [Text(""), render_findings(said)]
    if report.comparison is not None:
        lines += [Text(""), Text("Compared with full precision", style="bold"), facts(_comparison(report.comparison))]
    return Group(*lines)


def _load_rows(report: LoadReport) -> Iterator[tuple[str, str]]:
    if report.files:
        yield "read", f"{format_bytes(report.num_bytes)} in {report.num_tensors} tensors from {_names(report.files)}"
    else:
        yield "weights", "random, the same for the same seed"
    yield "time", f"{report.time_s:.2f} s"
    if report.final_device_bytes is not None and report.peak_device_bytes is not None:
        over = report.peak_device_bytes - report.final_device_bytes
        way = f"never more than {format_bytes(over)} above that during the run" if over else "never more during the run"
        yield "on the GPU", f"{format_bytes(report.final_device_bytes)}, {way}"
    if report.host_anonymous_bytes is not None:
        yield "on the host", f"{format_bytes(report.host_anonymous_bytes)} at most"
    if report.num_resident_layers < report.num_layers:
        waiting = report.num_layers - report.num_resident_layers
        yield "offloaded", f"{waiting} of {report.num_layers} layers wait in host memory and are copied when needed"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


def _comparison(comparison: LogitComparison) -> Iterator[tuple[str, str]]:
    largest, reach = comparison.max_abs_difference, comparison.max_abs_output
    yield "samples", f"{comparison.num_sentences} {comparison.inputs}"
    yield "largest difference", f"{largest:.3g} (outputs reach {reach:.3g})"
    yield "lowest cosine", f"{comparison.cosine:.6f}"
    if comparison.label_agreement is not None:
        yield "same top label", f"{100 * comparison.label_agreement:.1f} %"


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
        yield _changes(fitting)
    for note in fitting.notes:
        yield Text.assemble(("· ", "cyan"), note)


def _passes(fitting: Fitting) -> str:
    plan = fitting.plan
    if plan.workload.is_packed:
        return f"in passes of up to {plan.micro_batch * plan.workload.sample_tokens:,} tokens, without padding"
    return (
        "all in one pass"
        if plan.workload.num_passes == 1
        else f"in {plan.workload.num_passes} passes of at most {plan.micro_batch}"
    )


def _changes(fitting: Fitting) -> RenderableType:
    rows = table("Changed", "from", "to", "Why", wraps=("from", "to", "Why"))
    for change in fitting.changes:
        rows.add_row(change.name, change.before, change.after, change.why)
    return rows


def render_comparison(comparison: Comparison) -> RenderableType:
    """What ran, predicted beside measured for every phase, and whether they agree."""
    m = comparison.measurement
    headline = Text.assemble((model_name(m.workload.model), "bold"), f"  {', '.join(job(m.workload))}")
    machine = Text(f"{m.gpu}, torch {m.torch_version}, transformers {m.transformers_version}", style="dim")
    return Group(headline, machine, Text(), _differences(comparison), Text(), *_remarks(comparison))


def _differences(comparison: Comparison) -> Table:
    rows = table("", "", "predicted", "measured", "error", " ", right=("predicted", "measured", "error", " "))
    shown = ""
    for difference in comparison.differences:
        phase = phase_name(difference.phase, comparison.measurement.workload)
        style = _style(difference, comparison.tolerance)
        rows.add_row(
            "" if phase == shown else phase,
            difference.figure,
            size(difference.predicted_bytes),
            size(difference.measured_bytes),
            Text(_signed(difference.error_bytes), style=style),
            Text(_percent(difference.error), style=style),
        )
        shown = phase
    return rows


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
    facts = list(_measured_facts(m))
    if facts:
        yield Text(", ".join(facts) + ".", style="dim")
    if comparison.basis != "verified":
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


def _measured_facts(m: Measurement) -> Iterator[str]:
    if m.step_time_s is not None:
        yield f"{1000 * m.step_time_s:.1f} ms a {'step' if m.workload.trains else 'batch'}"
    if m.process_bytes is not None and m.context_bytes is not None:
        yield f"the process held {size(m.process_bytes)}, {size(m.context_bytes)} of them CUDA's own"
    if m.num_retries:
        yield f"the allocator freed its cache and tried again {m.num_retries} times"


def render_receipts(receipts: Sequence[Receipt]) -> RenderableType:
    """A table of receipts, and how many speak for each card."""
    shown = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2))
    for name in ("card", "torch", "job", "allocated", "off by", "reserved", "off by", "step", "predicted", ""):
        shown.add_column(name, justify="left" if name in ("card", "torch", "job", "") else "right")
    for receipt in receipts:
        shown.add_row(*_receipt_row(receipt))
    return Group(shown, *_card_verdicts(receipts))


def _receipt_row(r: Receipt) -> list[str]:
    workload = Workload.from_keywords(model=r.model, **r.settings)
    words = ", ".join([f"{workload.batch} × {workload.seq}", *chosen_in_words(workload)])
    mark = "emulated" if r.is_emulated else "ran out" if r.ran_out else "" if r.agrees else "differs"
    return [
        r.gpu,
        ".".join(map(str, r.torch_release)),
        f"{r.kind} {r.model[:MODEL_WIDTH]} {words}",
        format_bytes(r.measured.allocated_bytes),
        _receipt_off(r, "allocated"),
        format_bytes(r.measured.reserved_bytes),
        _receipt_off(r, "reserved"),
        _step_seconds(r.measured.step_time_s),
        _step_seconds(r.predicted.step_time_s),
        mark,
    ]


def _receipt_off(r: Receipt, figure: str) -> str:
    """How far a prediction was off; nothing where the CPU's kernels ran, which take other temporaries."""
    return "–" if r.is_emulated else f"{100 * r.error(figure):+.2f} %"


def _step_seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s"


def _card_verdicts(receipts: Sequence[Receipt]) -> list[RenderableType]:
    """One line a card and torch release."""
    measured, lines = measured_pairs(receipts), []
    real = [r for r in receipts if not r.is_emulated and r.compute_capability is not None]
    for capability, release in sorted({(r.compute_capability or (0, 0), r.torch_release) for r in real}):
        of_pair = [r for r in real if (r.compute_capability, r.torch_release) == (capability, release)]
        name = f"sm_{capability[0]}{capability[1]} with torch {release[0]}.{release[1]}"
        differ = sum(not r.agrees for r in of_pair)
        if (release, capability) in measured:
            said = f"measured: {counted(measured[release, capability], 'job')} agree"
        elif differ:
            said = f"not measured: {differ} of {counted(len(of_pair), 'receipt')} differ from the prediction"
        else:
            said = (
                f"not measured yet: {counted(len(of_pair), 'receipt')}, and {NUM_NEEDED} of different jobs are needed"
            )
        lines.append(Text(f"{name}: {said}."))
    num_emulated = len(receipts) - len(real)
    if num_emulated:
        lines.append(Text(f"{counted(num_emulated, 'receipt')} of the emulated GPU: no proof about a card."))
    return [Text(), *lines] if lines else []
