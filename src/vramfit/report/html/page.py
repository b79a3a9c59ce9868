"""A report as one HTML file: text, tables and figures, with plotly inside; it asks for nothing from outside."""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from vramfit import __version__
from vramfit.errors import MissingExtra
from vramfit.records.estimate import Estimate
from vramfit.records.measurement import FIGURES, Comparison
from vramfit.records.plan import Alternative, Plan
from vramfit.records.run import RunRecord, StepCourse
from vramfit.report.display import estimate_bar, figures_row
from vramfit.report.html import Drawn, Figure, figures, section, table, tag, text
from vramfit.report.html.figures import Lines, is_near, timeline
from vramfit.report.html.subject import Subject, reasons_of
from vramfit.report.models import models_head, models_sections
from vramfit.report.words import (
    KIND_WORDS,
    NO_BREAK,
    agreement,
    best_words,
    duration,
    job,
    memory_css,
    peak_moment,
    phase_name,
    reserved_peak,
    run_time,
    sentence,
    target,
    verdict_of,
)
from vramfit.tasks import find_task
from vramfit.units import GIB, counted, format_bytes

MIN_ALTERNATIVES = 2
"""Fewer, and the plan itself, are no picture: a table has them."""
BASIS = {
    "verified": "compared with measurements",
    "derived": "rules carried over from a measured GPU",
    "outside": "a GPU or a torch release that nothing is promised for",
}
PLAIN = ("step", "epoch", "kind", "loss")
"""Of an evaluation's line: what is no score."""
MIN_POINTS = 3
"""Fewer make no curve, and stand in a table."""
MAX_BYTES = 8 * 2**20
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Nothing is fetched, whatever is in the file."""


def render_report(subject: Subject, *, made_at: str = "") -> str:
    """The report of a subject.

    Args:
        made_at: when, to show.

    Raises:
        MissingExtra: plotly is not installed.
    """
    drawn = Drawn()
    body = "".join(sections_of(subject, drawn))
    title = f"{_title(subject)} · vramfit"
    meta = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    )
    made = f"Made by vramfit {__version__}{f', {made_at}' if made_at else ''}, from {subject.source}."
    return "".join(
        (
            '<!doctype html><html lang="en"><head>',
            meta,
            tag("title", text(title)),
            tag("style", memory_css(), _own("report.css")),
            "</head><body><main>",
            body,
            "</main>",
            tag("footer", tag("p", text(made))),
            f'<script type="application/json" id="figures">{_script_json(drawn.figures)}</script>',
            f"<script>{plotly_script()}</script>" if drawn.figures else "",
            f"<script>{_own('report.js')}</script></body></html>\n",
        )
    )


def _title(subject: Subject) -> str:
    if subject.models is not None:
        return "Models compared"
    if subject.run is not None:
        return f"Run of {subject.run.model}"
    workload = subject.workload
    kind = "Plan" if subject.plan is not None else "Measurement" if subject.comparison is not None else "Estimate"
    return kind if workload is None else f"{kind} of {workload.model}"


def _own(name: str) -> str:
    return files("vramfit.report.html").joinpath(name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """plotly.js, as its Python package brings it.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        raise MissingExtra("vramfit report", extra="web", package="plotly") from None


def _script_json(figures: dict[str, Figure]) -> str:
    """JSON that no text inside can end the script with."""
    made: Any = json.dumps(figures, separators=(",", ":"), ensure_ascii=False)
    return str(made).replace("<", "\\u003c")


def sections_of(subject: Subject, drawn: Drawn) -> Iterator[str]:
    """All sections for which there is something to show, and why others are not there."""
    if subject.models is not None:
        yield models_head(subject.models)
        yield from models_sections(subject.models, drawn)
    else:
        yield _head(subject)
    if subject.run is not None or subject.metrics:
        yield from run_sections(subject, drawn)
    if subject.comparison is not None:
        yield _comparison(subject.comparison)
    if subject.estimate is not None:
        yield from _estimate(subject, drawn)
    if subject.grid is not None and subject.workload is not None:
        yield _grid(subject, drawn)
    if subject.plan is not None:
        yield from _plan(subject.plan, drawn)
    missing = [tag("li", text(reason)) for reason in reasons_of(subject)]
    if missing:
        yield section("What is not shown", tag("ul", *missing))
    yield _environment(subject)


def _head(subject: Subject) -> str:
    estimate, run = subject.estimate, subject.run
    parts = []
    if run is not None:
        device = "the emulated GPU" if run.device == "emulated" else run.device
        parts.append(tag("p", text(f"{run.model} · {run.task} · on {device}"), class_="quiet"))
        parts.append(tag("h1", text(f"{counted(run.num_steps, 'step')}, {run.status}{best_words(run)}")))
    elif estimate is not None:
        verdict = verdict_of(estimate)
        w = estimate.workload
        asked = " · ".join([w.model, w.task, w.mode, *job(w), target(estimate)])
        parts += [tag("p", text(asked), class_="quiet"), tag("h1", text(verdict.headline), class_=verdict.tone)]
        parts += [tag("p", text(line)) for line in verdict.details]
    elif subject.comparison is not None:
        m = subject.comparison.measurement
        parts.append(tag("p", text(" · ".join([m.workload.model, *job(m.workload), m.gpu])), class_="quiet"))
        worst = f"{100 * subject.comparison.worst_error:.2f} %"
        parts.append(tag("h1", text(f"{agreement(subject.comparison)}: {worst} off at worst")))
    else:
        parts.append(tag("h1", text("A run that is not finished")))
    if estimate is not None:
        parts.append(estimate_bar(estimate))
    parts += [tag("p", text(sentence(note)), class_="note") for note in subject.notes]
    return tag("section", *parts, class_="card head")


def _estimate(subject: Subject, drawn: Drawn) -> Iterator[str]:
    estimate = subject.estimate
    assert estimate is not None
    shown, course = subject.course_estimate or estimate, subject.course
    about = "Predicted, stacked by what it is."
    if course is not None and subject.course_estimate is not None:
        about = _beside(subject.course_estimate, course)
    if shown.capacity_bytes is not None:
        where = "The dashed line" if is_near(shown) else "Far above this axis"
        about += f" {where}: the {format_bytes(shown.capacity_bytes)} that may be reserved."
    place = drawn.place("timeline", timeline(shown, course if subject.course_estimate else None), about)
    yield section("One step, from left to right", place, about=about)
    when = f"{format_bytes(estimate.peak_allocated_bytes)} allocated, {peak_moment(estimate.peak, estimate.workload)}."
    tree = drawn.place("modules", figures.icicle(estimate), "What is alive at the peak, by module")
    about = f"{when} Click a module to look inside; what is too narrow to be named is left out."
    yield section("Alive at the peak, by module", tree, about=about)
    rows = [
        (phase_name(name, estimate.workload), *(format_bytes(getattr(p, f"peak_{figure}_bytes")) for figure in FIGURES))
        for name, p in estimate.phases.items()
    ]
    yield section("Phases", figures_row(estimate), table(("", *FIGURES), rows, right=(1, 2, 3)))


def _beside(predicted: Estimate, course: StepCourse) -> str:
    """How near the prediction of a recorded step is."""
    most, measured = max(point.requested_bytes for point in predicted.timeline), max(course.requested_bytes)
    off = 100 * (most - measured) / measured
    size = f"{course.batch} × {course.seq} tokens"
    if course.lengths:
        size = f"{len(course.lengths):,} sequences, {sum(course.lengths):,} tokens, nothing padded"
    emulated = course.device == "emulated"
    where = ", on which workspaces of CUDA's libraries take nothing" if emulated else ""
    return (
        f"Step {course.step:,} ({size}) as it ran on {'the emulated GPU' if emulated else course.device}{where}, over "
        f"its prediction. Peak of what was requested: measured {format_bytes(measured)}, predicted "
        f"{format_bytes(most)} ({off:+.2f} %)."
    )


def _grid(subject: Subject, drawn: Drawn) -> str:
    grid, workload = subject.grid, subject.workload
    assert grid is not None
    assert workload is not None
    micro_batch = workload.micro_batch or workload.batch
    figure = figures.heat_map(grid, micro_batch, workload.seq)
    if grid.capacity_bytes is None:
        about = "Reserved at most, with all other settings kept; the frame is this job."
    else:
        about = (
            f"Reserved at most, with all other settings kept. The line is the border of what fits in "
            f"{format_bytes(grid.capacity_bytes)}; the frame is this job."
        )
    return section("What fits, by batch and length", drawn.place("grid", figure, about), about=about)


def _plan(plan: Plan, drawn: Drawn) -> Iterator[str]:
    from vramfit.report.plan import estimate_command, train_command

    rows = [
        (
            r.setting,
            KIND_WORDS[r.kind].replace(" ", NO_BREAK),
            f"{sentence(r.why)}{f' Costs in quality: {r.cost}.' if r.cost else ''}",
        )
        for r in plan.reasons
    ]
    about = (
        f"Passes of {plan.micro_batch}, {plan.workload.num_passes} a step, about {duration(plan.step_time_s)} a step; "
        f"evaluation in batches of {plan.evaluation_batch}. {sentence(plan.margin_reason)}"
    )
    commands = [train_command(plan.workload, "plan.json")] if find_task(plan.workload.task).is_trained else []
    commands.append(estimate_command(plan.workload))
    shown = "".join(tag("pre", text(command)) for command in commands)
    yield section("The plan", table(("Setting", "Class", "Why"), rows, stacked=True), shown, about=about)
    if plan.alternatives:
        yield _alternatives(plan, drawn)


def _alternatives(plan: Plan, drawn: Drawn) -> str:
    e = plan.estimate
    passes = f"{plan.micro_batch} × {plan.workload.num_passes}"
    seconds = duration(e.step_time_s or plan.step_time_s)
    rows = [("this plan", passes, seconds, format_bytes(e.safe_reserved_bytes))]
    rows += [
        (a.settings + _why_not(a), a.split, duration(a.step_time_s), format_bytes(a.safe_reserved_bytes))
        for a in plan.alternatives
    ]
    place = ""
    if len(plan.alternatives) >= MIN_ALTERNATIVES:
        place = drawn.place("alternatives", figures.alternatives(plan), "Memory against time of the alternatives")
    head = ("Settings", "passes", "a step", "reserved")
    about = f"The line is the budget of {format_bytes(plan.budget_bytes)}." if place else ""
    return section("What else was possible", place, table(head, rows, right=(1, 2, 3)), about=about)


def _why_not(a: Alternative) -> str:
    """Why an alternative was not taken, where its step time does not say it."""
    if not a.fits:
        return ": does not fit"
    if not a.allowed:
        return ": fits, but is not allowed"
    return f": {a.why_not}" if a.why_not else ""


def _comparison(c: Comparison) -> str:
    rows = [
        (
            d.phase.replace("_", " "),
            d.figure,
            f"{d.predicted_bytes:,}",
            f"{d.measured_bytes:,}",
            f"{d.error_bytes:+,}",
            f"{100 * d.error:+.3f} %",
        )
        for d in c.differences
    ]
    head = ("Phase", "figure", "predicted, bytes", "measured, bytes", "off by", "")
    about = f"On {c.measurement.gpu}; {c.measurement.num_retries} allocator retries."
    return section("Predicted and measured", table(head, rows, right=(2, 3, 4, 5)), about=about)


def _environment(subject: Subject) -> str:
    rows = [(name, value) for name, value in subject.environment.items()]
    e = subject.estimate
    if e is not None:
        rows += [("predicted for", target(e)), ("basis", f"{e.basis}: {BASIS[e.basis]}")]
        rows += [("note", sentence(note)) for note in e.notes]
    return section("Environment and versions", table((), rows))


def run_sections(subject: Subject, drawn: Drawn) -> Iterator[str]:
    """A run's record and the curves of its journal."""
    run = subject.run
    if run is not None:
        yield section("What it took", table((), _rows(run)))
    train = [line for line in subject.metrics if line.get("kind") == "train"]
    evaluated = [line for line in subject.metrics if line.get("kind") == "eval"]
    budget = None if run is None else run.budget_bytes
    limit = "" if budget is None else f"; the line is the budget of {format_bytes(budget)}"
    is_emulated = run is not None and run.device == "emulated"
    speed: Lines = {} if is_emulated else _lines({"tokens a second": (train, "tokens_per_s")})
    wanted = [
        ("loss", _lines({"training": (train, "loss"), "evaluation": (evaluated, "loss")}), "Loss", "loss", None),
        ("scores", _lines({n: (evaluated, n) for n in _scores(evaluated)}), "What it reached", figures.SCORE, None),
        ("speed", speed, "Throughput", "tokens/s", None),
        (
            "reserved",
            _lines({"reserved": (train, "reserved_bytes")}, scale=1 / GIB),
            f"Reserved peak so far{limit}",
            "GiB",
            None if budget is None else budget / GIB,
        ),
    ]
    made = [
        tag("div", tag("h3", text(title)), _shown(drawn, name, lines, title, figures.curve(lines, unit, limit=most)))
        for name, lines, title, unit, most in wanted
        if lines
    ]
    if made:
        yield section("How it went", tag("div", *made, class_="grid"))


def _shown(drawn: Drawn, name: str, lines: Lines, title: str, figure: Figure) -> str:
    """A curve; a table where there are too few points for one."""
    if max(len(steps) for steps, _ in lines.values()) >= MIN_POINTS:
        return drawn.place(name, figure, title)
    found = {key: dict(zip(*line, strict=True)) for key, line in lines.items()}
    steps = sorted({step for points in found.values() for step in points})
    rows = [(f"{n:,}", *(_figure(points.get(n)) for points in found.values())) for n in steps]
    return table(("step", *found), rows, right=range(1, len(found) + 1))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _scores(evaluated: Sequence[Mapping[str, Any]]) -> list[str]:
    last = evaluated[-1] if evaluated else {}
    return [name for name, value in last.items() if isinstance(value, float) and name not in PLAIN][:6]


def _lines(wanted: Mapping[str, tuple[list[Mapping[str, Any]], str]], *, scale: float = 1.0) -> Lines:
    found = {}
    for name, (lines, key) in wanted.items():
        points = [(line["step"], line[key] * scale) for line in lines if isinstance(line.get(key), int | float)]
        if points:
            found[name] = ([step for step, _ in points], [value for _, value in points])
    return found


def _rows(r: RunRecord) -> Iterator[tuple[str, str]]:
    yield "settings", ", ".join(f"{name} {value}" for name, value in r.settings.items())
    yield "data", f"{counted(r.num_samples, 'sample')}, {counted(r.num_epochs, 'epoch')}, {r.num_tokens:,} tokens"
    yield "time", run_time(r)
    if r.step_time_s is not None and r.device != "emulated":
        predicted = "" if r.predicted_step_time_s is None else f"; predicted {duration(r.predicted_step_time_s)}"
        yield "a step", f"{duration(r.step_time_s)}{predicted}"
    if r.measured_reserved_bytes is not None:
        yield "reserved peak", reserved_peak(r)
    if r.measured_allocated_bytes is not None:
        yield "allocated peak", format_bytes(r.measured_allocated_bytes)
    yield "out of memory", f"{r.num_recoveries:,} times, and nothing was lost" if r.num_recoveries else "never"
    yield from (("changed", change.said) for change in r.changes)
    yield "saved in", r.output
    for note in r.notes:
        yield "note", note
