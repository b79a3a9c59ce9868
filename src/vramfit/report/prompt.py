"""Records as a Python prompt shows them: what they are of and what they say, in one to three lines."""

from vramfit.records.estimate import Estimate, MaxBatch
from vramfit.records.fitting import Fitting
from vramfit.records.load_report import LoadReport
from vramfit.records.measurement import Comparison, Measurement
from vramfit.records.plan import Plan
from vramfit.records.run import RunRecord
from vramfit.records.watch import WatchRecord
from vramfit.report.verdict import verdict_of
from vramfit.report.words import job, reserved_words, target
from vramfit.units import counted, format_bytes

MAX_NAMES = 4


def estimate_repr(e: Estimate) -> str:
    """The job, the four figures, and whether it fits."""
    w = e.workload
    figures = ", ".join(
        f"{name} {format_bytes(getattr(e, f'peak_{name}_bytes'))}"
        for name in ("requested", "allocated", "reserved", "process")
    )
    return _shown(
        "Estimate", f"{', '.join([w.model, w.mode, *job(w)])}; {target(e)}", f"peak {figures}", verdict_of(e).headline
    )


def max_batch_repr(m: MaxBatch) -> str:
    """The batch, and what limits it."""
    e, w = m.estimate, m.estimate.workload
    found = f"batch {m.batch:,}" if m.batch else "not even one sample fits"
    found += f", {m.margin_batch:,} with the margin that plans keep" if m.margin_batch is not None else ""
    return _shown(
        "MaxBatch",
        f"{found}: {', '.join([w.model, w.mode, *job(w, batch=False)])}; {target(e)}",
        f"limited by: {m.limited_by}",
    )


def plan_repr(p: Plan) -> str:
    """The split and the settings, what they take, and how fast they are predicted to be."""
    w = p.workload
    split = f"passes of {p.micro_batch}, {p.accumulate} a step" if p.accumulate > 1 else "one pass a step"
    settings = ", ".join(reason.setting for reason in p.reasons) or "the plainest settings"
    return _shown(
        "Plan",
        f"{w.model}, batch {w.batch:,} × {w.seq:,} tokens; {target(p.estimate)}",
        f"{split}; {settings}",
        f"{reserved_words(p)}; about {p.step_time_s:.3g} s a step; {_count(p.alternatives, 'alternative')}",
    )


def fitting_repr(f: Fitting) -> str:
    """What was changed, and what it takes now."""
    p = f.plan
    return _shown(
        "Fitting",
        f"{f.trainer} with {f.model}: at most {format_bytes(f.most_bytes)} of {format_bytes(p.budget_bytes)}",
        f"{_count(f.changes, 'change')}: {_names([change.name for change in f.changes])}",
    )


def run_repr(r: RunRecord) -> str:
    """What was reached, and what it took."""
    best = "" if r.best_value is None else f", {r.best_metric} {r.best_value:.4f}"
    took = (
        "" if r.measured_reserved_bytes is None else f", {format_bytes(r.measured_reserved_bytes)} reserved at the peak"
    )
    return _shown(
        "RunRecord",
        f"{r.model}, {r.task}, on {r.device}: {r.status}",
        f"{counted(r.num_steps, 'step')} in {r.time_s:,.1f} s{best}{took}; {_count(r.evaluations, 'evaluation')}",
        f"saved in {r.output}",
    )


def measurement_repr(m: Measurement) -> str:
    """What was run, and the highest peaks."""
    w = m.workload
    peaks = m.phases.values()
    figures = ", ".join(
        f"{name} {format_bytes(max(getattr(peak, f'peak_{name}_bytes') for peak in peaks))}"
        for name in ("requested", "allocated", "reserved")
        if peaks
    )
    end = "out of memory" if m.out_of_memory is not None else _count(m.steps, "step")
    return _shown("Measurement", f"{', '.join([w.model, w.mode, *job(w)])}; {m.gpu}", f"{end}; peak {figures or '–'}")


def comparison_repr(c: Comparison) -> str:
    """Whether they agree, and by how much not."""
    w = c.measurement.workload
    agrees = "agree" if c.agrees else "do not agree"
    return _shown(
        "Comparison",
        f"{', '.join([w.model, w.mode, *job(w)])}; {c.measurement.gpu}",
        f"prediction and measurement {agrees}: {100 * c.worst_error:.2f} % apart at worst, "
        f"{100 * c.tolerance:.3g} % allowed",
    )


def watch_repr(w: WatchRecord) -> str:
    """How long, the peaks, and how much was found."""
    peaks = ", ".join(
        f"{name} {format_bytes(peak)}"
        for name in ("requested", "allocated", "reserved", "process")
        if (peak := getattr(w, f"peak_{name}_bytes")) is not None
    )
    found = _names([finding.check.removeprefix("watch.") for finding in w.findings])
    return _shown(
        "WatchRecord",
        f"{w.device}, {w.num_steps:,} steps and {w.num_forwards:,} passes in {w.time_s:,.1f} s",
        f"peak {peaks}" if peaks else "no allocator to ask",
        f"{_count(w.findings, 'finding')}{f': {found}' if found else ''}; {_count(w.samples, 'sample')}",
    )


def load_repr(r: LoadReport) -> str:
    """What was loaded, and what is missing or too much."""
    quantized = f", {r.num_quantized} layers in {r.quantize}" if r.quantize else ""
    return _shown(
        "LoadReport",
        f"{r.model} as {r.model_class}, {r.precision}{quantized}, on {r.device}",
        f"{r.num_tensors:,} tensors, {format_bytes(r.num_bytes)} in {r.time_s:.2f} s; {len(r.fresh)} fresh, "
        f"{len(r.dropped)} dropped; {_count(r.findings, 'finding')}",
    )


def _shown(kind: str, *lines: str) -> str:
    return f"<{kind} " + "\n  ".join(lines) + ">"


def _count(things: tuple[object, ...], name: str) -> str:
    return counted(len(things), name)


def _names(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
