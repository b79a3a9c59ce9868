"""Records as they show themselves in notebooks: small, static HTML with its own colours, no script."""

from collections.abc import Mapping, Sequence

from vramfit.records.estimate import CATEGORIES, Estimate, MaxBatch
from vramfit.records.measurement import Comparison
from vramfit.records.plan import Plan
from vramfit.records.run import RunRecord
from vramfit.report.html.markup import tag, text
from vramfit.report.verdict import verdict_of
from vramfit.report.words import job, reserved_peak, target
from vramfit.units import counted, format_bytes

COLOURS: Mapping[str, str] = {
    "weights": "#3f74e0",
    "gradients": "#8a5fd6",
    "optimizer": "#e0952b",
    "activations": "#2aa37c",
    "temporaries": "#35a6c8",
    "workspaces": "#7d8796",
    "inputs": "#d0608c",
    "unused": "#b6bec9",
    "CUDA context": "#98a3b2",
}
"""The same in light and dark notebooks."""
TONES = {"good": "#17915c", "tight": "#b07500", "bad": "#d43c4c", "open": "inherit"}
WIDTH, HEIGHT = 800, 34


def estimate_html(e: Estimate) -> str:
    """An estimate: whether it fits, the bar, the four figures."""
    verdict = verdict_of(e)
    return _card(
        _head(e.workload.model, [e.workload.task, e.workload.mode, *job(e.workload), target(e)]),
        _answer(verdict.headline, TONES[verdict.tone]),
        *(_quiet(line) for line in verdict.details),
        estimate_bar(e),
        figures_row(e),
    )


def plan_html(p: Plan) -> str:
    """A plan: its split, the bar, its settings with their reasons."""
    w = p.workload
    split = f"passes of {p.micro_batch}, {p.accumulate} a step" if p.accumulate > 1 else f"all {w.batch} in one pass"
    return _card(
        _head(w.model, [w.task, f"batch {w.batch} × {w.seq} tokens", target(p.estimate)]),
        _answer(f"Fits: {split}, about {p.step_time_s:.3g} s a step", TONES["good"]),
        _quiet(f"At most {format_bytes(p.estimate.safe_reserved_bytes)} of {format_bytes(p.budget_bytes)}."),
        estimate_bar(p.estimate),
        _rows([(r.setting, r.why) for r in p.reasons]),
    )


def max_batch_html(m: MaxBatch) -> str:
    """A largest batch, and what limits it."""
    e = m.estimate
    found = f"Largest batch: {m.batch:,}" if m.batch else "Not even one sample fits"
    return _card(
        _head(e.workload.model, [e.workload.task, e.workload.mode, *job(e.workload, batch=False), target(e)]),
        _answer(found, TONES["good" if m.batch else "bad"]),
        *(
            [_quiet(f"{m.margin_batch:,} with the margin that plans keep: {m.margin_reason}.")]
            if m.margin_reason
            else []
        ),
        _quiet(f"What limits it: {m.limited_by}."),
        estimate_bar(e),
    )


def run_html(r: RunRecord) -> str:
    """A run: what it reached and what it took."""
    best = "" if r.best_value is None else f", {r.best_metric} {r.best_value:.4f}"
    rows = [
        ("settings", ", ".join(f"{name} {value}" for name, value in r.settings.items())),
        ("time", f"{r.time_s:,.1f} s, {r.tokens_per_s:,.0f} tokens/s"),
        ("saved in", r.output),
    ]
    if r.measured_reserved_bytes is not None:
        rows.insert(2, ("reserved peak", reserved_peak(r)))
    return _card(
        _head(r.model, [r.task, r.device]),
        _answer(f"{counted(r.num_steps, 'step')}, {r.status}{best}", "inherit"),
        _rows(rows),
    )


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
    agrees = "agree" if c.agrees else "do not agree"
    return _card(
        _head(w.model, [*job(w), c.measurement.gpu]),
        _answer(f"Prediction and measurement {agrees}", TONES["good" if c.agrees else "bad"]),
        _rows(rows),
    )


def estimate_bar(e: Estimate) -> str:
    """What is in memory at the peak, side by side, against the line of the GPU; with its legend."""
    parts: list[tuple[str, int]] = [(name, e.breakdown.get(name, 0)) for name in CATEGORIES]
    parts.append(("unused", max(e.safe_reserved_bytes - e.peak_allocated_bytes, 0)))
    is_whole = e.capacity_bytes is not None and e.capacity_bytes + e.context_bytes == e.total_memory_bytes
    if is_whole:
        parts.append(("CUDA context", e.context_bytes))
    shown = [(name, num_bytes) for name, num_bytes in parts if num_bytes]
    need = sum(num_bytes for _, num_bytes in shown)
    limit = e.total_memory_bytes if is_whole else e.capacity_bytes
    scale = 1.02 * max(need, limit or 0, 1)
    name = f"{e.gpu or 'GPU'} {format_bytes(limit or 0)}" if is_whole else f"{format_bytes(limit or 0)} may be reserved"
    mark = "" if limit is None else _mark(name, limit / scale)
    return mark + _svg(shown, limit, scale, need) + _legend(shown)


def _mark(name: str, share: float) -> str:
    """What the line in the bar is, above it and on the side that has room."""
    side = f"right:{100 - 100 * share:.2f}%" if share > 0.5 else f"left:{100 * share:.2f}%"
    label = tag("span", text(name), style=f"position:absolute;bottom:0;{side};white-space:nowrap;font-weight:600")
    look = "position:relative;max-width:1040px;height:1.4em;margin-top:.5em;font-size:.8em"
    return tag("div", label, class_="budget", style=look)


def _svg(parts: Sequence[tuple[str, int]], limit: int | None, scale: float, need: int) -> str:
    pieces, at = [], 0.0
    for name, num_bytes in parts:
        width = WIDTH * num_bytes / scale
        title = tag("title", text(f"{name}: {format_bytes(num_bytes)}"))
        pieces.append(
            tag("rect", title, x=f"{at:.2f}", y="6", width=f"{width:.2f}", height=str(HEIGHT), fill=COLOURS[name])
        )
        at += width
    said = f"{format_bytes(need)} at most"
    if limit is not None:
        x = f"{WIDTH * limit / scale:.2f}"
        pieces.append(tag("line", x1=x, x2=x, y1="0", y2=str(HEIGHT + 12), stroke="currentColor", stroke_width="3"))
        said += f" of {format_bytes(limit)}"
    view = f"0 0 {WIDTH} {HEIGHT + 12}"
    look = "width:100%;max-width:1040px;height:46px;display:block;margin:.1em 0 .2em"
    return tag("svg", *pieces, viewBox=view, preserveAspectRatio="none", role="img", aria_label=said, style=look)


def _legend(parts: Sequence[tuple[str, int]]) -> str:
    dot = "display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.35em;background:"
    items = [
        tag(
            "span",
            tag("i", style=f"{dot}{COLOURS[name]}"),
            text(f"{name} {format_bytes(num_bytes)}"),
            style="white-space:nowrap;margin-right:1em",
        )
        for name, num_bytes in parts
    ]
    return tag("p", " ".join(items), style="margin:.2em 0;font-size:.88em")


def figures_row(e: Estimate) -> str:
    """The four figures, to the byte."""
    names = ("requested", "allocated", "reserved", "process")
    cells = [
        tag(
            "span",
            tag("b", text(name)),
            text(f" {format_bytes(getattr(e, f'peak_{name}_bytes'))} ({getattr(e, f'peak_{name}_bytes'):,} B)"),
            style="white-space:nowrap;margin-right:1.2em",
        )
        for name in names
    ]
    return tag("p", " ".join(cells), style="margin:.2em 0;font-size:.88em")


def _card(*inside: str) -> str:
    look = "font-family:system-ui,sans-serif;line-height:1.45;max-width:1040px;padding:.4em 0"
    return tag("div", *inside, class_="vramfit", style=look)


def _head(name: str, phrases: Sequence[str]) -> str:
    return tag(
        "p", tag("b", text(name)), text(f" · {' · '.join(phrases)}"), style="margin:0;opacity:.75;font-size:.9em"
    )


def _answer(words: str, colour: str) -> str:
    return tag("p", text(words), style=f"margin:.1em 0;font-size:1.25em;font-weight:650;color:{colour}")


def _quiet(words: str) -> str:
    return tag("p", text(words), style="margin:.1em 0;opacity:.75;font-size:.9em")


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    cell = "text-align:left;vertical-align:top;padding:.1em 1em .1em 0;font-size:.9em"
    made = [
        tag("tr", tag("th", text(name), scope="row", style=cell), tag("td", text(value), style=cell))
        for name, value in rows
    ]
    return tag("table", tag("tbody", *made), style="border-collapse:collapse;margin:.4em 0")
