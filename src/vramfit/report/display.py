"""Records as they show themselves: a few lines in a prompt, small static HTML without scripts in a notebook."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vramfit.records.estimate import CATEGORIES, FIGURES, Estimate, MaxBatch
from vramfit.records.finding import LoadReport
from vramfit.records.measurement import Comparison, Measurement
from vramfit.records.plan import Fitting, Plan
from vramfit.records.run import RunRecord
from vramfit.records.watch import WatchRecord
from vramfit.report.html import tag, text
from vramfit.report.words import (
    MEMORY,
    Tone,
    agreement,
    best_words,
    duration,
    job,
    reserved_peak,
    reserved_words,
    run_time,
    target,
    verdict_of,
)
from vramfit.units import counted, format_bytes
from vramfit.workload import Workload

MAX_NAMES = 4
TONES = {"good": "#17915c", "tight": "#b07500", "bad": "#d43c4c", "open": "inherit"}
WIDTH, HEIGHT = 800, 34


def estimate_repr(e: Estimate) -> str:
    """The job, the four figures, and whether it fits."""
    return _shown("Estimate", f"{_job(e.workload)}; {target(e)}", f"peak {_peaks(e)}", verdict_of(e).headline)


def max_batch_repr(m: MaxBatch) -> str:
    """The batch, and what limits it."""
    e, w = m.estimate, m.estimate.workload
    found = f"batch {m.batch:,}" if m.batch else "not even one sample fits"
    found += f", {m.margin_batch:,} with the headroom that plans keep" if m.margin_batch is not None else ""
    return _shown("MaxBatch", f"{found}: {_job(w, batch=False)}; {target(e)}", f"limited by: {m.limited_by}")


def plan_repr(p: Plan) -> str:
    """The split and the settings, what they take, and how fast they are predicted to be."""
    w = p.workload
    split = (
        f"passes of {p.micro_batch}, {p.workload.num_passes} a step" if p.workload.num_passes > 1 else "one pass a step"
    )
    settings = ", ".join(reason.setting for reason in p.reasons) or "the plainest settings"
    return _shown(
        "Plan",
        f"{w.model}, batch {w.batch:,} × {w.seq:,} tokens; {target(p.estimate)}",
        f"{split}; {settings}",
        f"{reserved_words(p)}; about {p.step_time_s:.3g} s a step; {_count(p.alternatives, 'alternative')}",
    )


def fitting_repr(f: Fitting) -> str:
    """What was changed, and what it takes now."""
    most, budget = format_bytes(f.most_bytes), format_bytes(f.plan.budget_bytes)
    changes = _names([change.name for change in f.changes])
    return _shown(
        "Fitting",
        f"{f.trainer} with {f.model}: at most {most} of {budget}",
        f"{_count(f.changes, 'change')}: {changes}",
    )


def run_repr(r: RunRecord) -> str:
    """What was reached, and what it took."""
    reserved = r.measured_reserved_bytes
    took = "" if reserved is None else f", {format_bytes(reserved)} reserved at the peak"
    return _shown(
        "RunRecord",
        f"{r.model}, {r.task}, on {r.device}: {r.status}",
        f"{counted(r.num_steps, 'step')} in {r.time_s:,.1f} s{best_words(r)}{took}; "
        f"{_count(r.evaluations, 'evaluation')}",
        f"saved in {r.output}",
    )


def measurement_repr(m: Measurement) -> str:
    """What was run, and the highest peaks."""
    end = "out of memory" if m.out_of_memory is not None else _count(m.steps, "step")
    return _shown("Measurement", f"{_job(m.workload)}; {m.gpu}", f"{end}; peak {_peaks(*m.phases.values()) or '–'}")


def comparison_repr(c: Comparison) -> str:
    """Whether they agree, and by how much not."""
    apart = f"{100 * c.worst_error:.2f} % apart at worst, {100 * c.tolerance:.3g} % allowed"
    words = agreement(c)
    return _shown(
        "Comparison",
        f"{_job(c.measurement.workload)}; {c.measurement.gpu}",
        f"{words[:1].lower()}{words[1:]}: {apart}",
    )


def watch_repr(w: WatchRecord) -> str:
    """How long, the peaks, and how much was found."""
    found = _names([finding.check.removeprefix("watch.") for finding in w.findings])
    peaks = _peaks(w)
    return _shown(
        "WatchRecord",
        f"{w.device}, {w.num_steps:,} steps and {w.num_forwards:,} passes in {w.time_s:,.1f} s",
        f"peak {peaks}" if peaks else "no allocator to ask",
        f"{_count(w.findings, 'finding')}{f': {found}' if found else ''}; {_count(w.samples, 'sample')}",
    )


def load_repr(r: LoadReport) -> str:
    """What was loaded, and what is missing or too much."""
    return _shown(
        "LoadReport",
        f"{r.model} as {r.model_class}, {r.weights_in_words}, on {r.device}",
        f"{r.num_tensors:,} tensors, {format_bytes(r.num_bytes)} in {r.time_s:.2f} s; {len(r.fresh)} fresh, "
        f"{len(r.dropped)} dropped; {_count(r.findings, 'finding')}",
    )


def _shown(kind: str, *lines: str) -> str:
    return f"<{kind} " + "\n  ".join(lines) + ">"


def _job(w: Workload, *, batch: bool = True) -> str:
    return ", ".join([w.model, w.mode, *job(w, batch=batch)])


def _peaks(*records: Any) -> str:
    """The highest peaks of records, as far as these have them."""
    found = {name: [getattr(r, f"peak_{name}_bytes", None) for r in records] for name in FIGURES}
    most = {name: max((n for n in peaks if n is not None), default=None) for name, peaks in found.items()}
    return ", ".join(f"{name} {format_bytes(n)}" for name, n in most.items() if n is not None)


def _count(things: tuple[object, ...], name: str) -> str:
    return counted(len(things), name)


def _names(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")


def estimate_html(e: Estimate) -> str:
    """An estimate: whether it fits, the bar, the four figures."""
    verdict = verdict_of(e)
    return _card(
        _head(e.workload.model, [e.workload.task, e.workload.mode, *job(e.workload), target(e)]),
        _answer(verdict.headline, verdict.tone),
        *(_quiet(line) for line in verdict.details),
        estimate_bar(e),
        figures_row(e),
    )


def plan_html(p: Plan) -> str:
    """A plan: its split, the bar, its settings with their reasons."""
    w = p.workload
    split = (
        f"passes of {p.micro_batch}, {p.workload.num_passes} a step"
        if p.workload.num_passes > 1
        else f"all {w.batch} in one pass"
    )
    return _card(
        _head(w.model, [w.task, f"batch {w.batch} × {w.seq} tokens", target(p.estimate)]),
        _answer(f"Fits: {split}, about {duration(p.step_time_s)} a step", "good"),
        _quiet(f"{reserved_words(p)}."),
        estimate_bar(p.estimate),
        _rows([(r.setting, r.why) for r in p.reasons]),
    )


def max_batch_html(m: MaxBatch) -> str:
    """A largest batch, and what limits it."""
    e, margin = m.estimate, f"{m.margin_batch or 0:,} with the headroom that plans keep: {m.margin_reason}."
    found = f"Largest batch: {m.batch:,}" if m.batch else "Not even one sample fits"
    return _card(
        _head(e.workload.model, [e.workload.task, e.workload.mode, *job(e.workload, batch=False), target(e)]),
        _answer(found, "good" if m.batch else "bad"),
        *([_quiet(margin)] if m.margin_reason else []),
        _quiet(f"What limits it: {m.limited_by}."),
        estimate_bar(e),
    )


def run_html(r: RunRecord) -> str:
    """A run: what it reached and what it took."""
    rows = [("settings", ", ".join(f"{name} {value}" for name, value in r.settings.items())), ("time", run_time(r))]
    if r.measured_reserved_bytes is not None:
        rows.append(("reserved peak", reserved_peak(r)))
    answer = _answer(f"{counted(r.num_steps, 'step')}, {r.status}{best_words(r)}", "open")
    return _card(_head(r.model, [r.task, r.device]), answer, _rows([*rows, ("saved in", r.output)]))


def comparison_html(c: Comparison) -> str:
    """A prediction beside its measurement."""
    w = c.measurement.workload
    rows = [
        (
            f"{d.phase.replace('_', ' ')}, {d.figure}",
            f"predicted {format_bytes(d.predicted_bytes)}, measured "
            f"{format_bytes(d.measured_bytes)} ({100 * d.error:+.2f} %)",
        )
        for d in c.differences
    ]
    answer = _answer(agreement(c), "good" if c.agrees else "bad")
    return _card(_head(w.model, [*job(w), c.measurement.gpu]), answer, _rows(rows))


def estimate_bar(e: Estimate) -> str:
    """What is in memory at the peak, side by side, against the line of the GPU; with its legend."""
    is_whole = e.capacity_bytes is not None and e.capacity_bytes + e.context_bytes == e.total_memory_bytes
    parts: dict[str, int] = {name: e.breakdown.get(name, 0) for name in CATEGORIES}
    parts["unused"] = max(e.safe_reserved_bytes - e.peak_allocated_bytes, 0)
    parts["CUDA context"] = e.context_bytes if is_whole else 0
    shown = [(name, num_bytes) for name, num_bytes in parts.items() if num_bytes]
    limit = e.total_memory_bytes if is_whole else e.capacity_bytes
    scale = 1.02 * max(sum(parts.values()), limit or 0, 1)
    name = f"{e.gpu or 'GPU'} {format_bytes(limit or 0)}" if is_whole else f"{format_bytes(limit or 0)} may be reserved"
    mark = "" if limit is None else _mark(name, limit / scale)
    return mark + _svg(shown, limit, scale) + _legend(shown)


def _mark(name: str, share: float) -> str:
    """What the line in the bar is, above it and on the side that has room."""
    side = f"right:{100 - 100 * share:.2f}%" if share > 0.5 else f"left:{100 * share:.2f}%"
    label = tag("span", text(name), style=f"position:absolute;bottom:0;{side};white-space:nowrap;font-weight:600")
    look = "position:relative;max-width:1040px;height:1.4em;margin-top:.5em;font-size:.8em"
    return tag("div", label, class_="budget", style=look)


def _svg(parts: Sequence[tuple[str, int]], limit: int | None, scale: float) -> str:
    pieces, at = [], 0.0
    for name, num_bytes in parts:
        size = {"x": f"{at:.2f}", "y": "6", "width": f"{WIDTH * num_bytes / scale:.2f}", "height": str(HEIGHT)}
        title = tag("title", text(f"{name}: {format_bytes(num_bytes)}"))
        pieces.append(tag("rect", title, **size, fill=MEMORY[name].light))
        at += WIDTH * num_bytes / scale
    said = f"{format_bytes(sum(num_bytes for _, num_bytes in parts))} at most"
    if limit is not None:
        x = f"{WIDTH * limit / scale:.2f}"
        pieces.append(tag("line", x1=x, x2=x, y1="0", y2=str(HEIGHT + 12), stroke="currentColor", stroke_width="3"))
        said += f" of {format_bytes(limit)}"
    view = f"0 0 {WIDTH} {HEIGHT + 12}"
    look = "width:100%;max-width:1040px;height:46px;display:block;margin:.1em 0 .2em"
    return tag("svg", *pieces, viewBox=view, preserveAspectRatio="none", role="img", aria_label=said, style=look)


def _legend(parts: Sequence[tuple[str, int]]) -> str:
    dot = "display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.35em;background:"
    dots = [tag("i", style=f"{dot}{MEMORY[name].light}") for name, _ in parts]
    return _in_line([(dot, f"{name} {format_bytes(n)}") for dot, (name, n) in zip(dots, parts, strict=True)], "1em")


def figures_row(e: Estimate) -> str:
    """The four figures, to the byte."""
    sizes = {name: getattr(e, f"peak_{name}_bytes") for name in FIGURES}
    return _in_line([(tag("b", text(name)), f" {format_bytes(n)} ({n:,} B)") for name, n in sizes.items()], "1.2em")


def _in_line(items: Sequence[tuple[str, str]], gap: str) -> str:
    """Marks with texts, side by side as long as there is room."""
    look = f"white-space:nowrap;margin-right:{gap}"
    spans = (tag("span", mark, text(words), style=look) for mark, words in items)
    return tag("p", " ".join(spans), style="margin:.2em 0;font-size:.88em")


def _card(*inside: str) -> str:
    look = "font-family:system-ui,sans-serif;line-height:1.45;max-width:1040px;padding:.4em 0"
    return tag("div", *inside, class_="vramfit", style=look)


def _head(name: str, phrases: Sequence[str]) -> str:
    return tag(
        "p", tag("b", text(name)), text(f" · {' · '.join(phrases)}"), style="margin:0;opacity:.75;font-size:.9em"
    )


def _answer(words: str, tone: Tone) -> str:
    return tag("p", text(words), style=f"margin:.1em 0;font-size:1.25em;font-weight:650;color:{TONES[tone]}")


def _quiet(words: str) -> str:
    return tag("p", text(words), style="margin:.1em 0;opacity:.75;font-size:.9em")


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    cell = "text-align:left;vertical-align:top;padding:.1em 1em .1em 0;font-size:.9em"
    made = [
        tag("tr", tag("th", text(name), scope="row", style=cell), tag("td", text(value), style=cell))
        for name, value in rows
    ]
    return tag("table", tag("tbody", *made), style="border-collapse:collapse;margin:.4em 0")


TEXTS: Mapping[type, Callable[[Any], str]] = {
    Estimate: estimate_repr,
    MaxBatch: max_batch_repr,
    Plan: plan_repr,
    Fitting: fitting_repr,
    RunRecord: run_repr,
    Measurement: measurement_repr,
    Comparison: comparison_repr,
    WatchRecord: watch_repr,
    LoadReport: load_repr,
}
DRAWINGS: Mapping[type, Callable[[Any], str]] = {
    Estimate: estimate_html,
    MaxBatch: max_batch_html,
    Plan: plan_html,
    RunRecord: run_html,
    Comparison: comparison_html,
}


def text_of(record: Any) -> str:
    """How a prompt shows a record."""
    return TEXTS[type(record)](record)


def html_of(record: Any) -> str | None:
    """How a notebook shows a record; None has it show the text."""
    draw = DRAWINGS.get(type(record))
    return None if draw is None else draw(record)
