"""The sections of a report, each from the records that are there."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vramfit.records.course import StepCourse
from vramfit.records.estimate import Estimate
from vramfit.records.measurement import Comparison
from vramfit.records.plan import Plan
from vramfit.records.run import RunRecord
from vramfit.report.html import figures
from vramfit.report.html.marks import Figure
from vramfit.report.html.markup import section, table, tag, text
from vramfit.report.html.subject import Subject
from vramfit.report.html.timeline import timeline
from vramfit.report.notebook import estimate_bar, figures_row
from vramfit.report.verdict import verdict_of
from vramfit.report.words import job, peak_moment, phase_name, reserved_peak, target
from vramfit.units import GIB, counted, format_bytes
from vramfit.workload import TRAINED_TASKS

KIND_WORDS = {"free": "same maths", "numeric": "fewer bits", "different training": "other training"}
PLAIN = ("step", "epoch", "kind", "loss")
"""Of an evaluation's line: what is no score."""


@dataclass
class Drawn:
    """Figures by the id of their place."""

    figures: dict[str, Figure] = field(default_factory=dict)

    def place(self, name: str, figure: Figure, said: str) -> str:
        """Keep a figure, and give its place in the page; `said` is for those who do not see it."""
        self.figures[name] = figure
        height = f"height:{figure['layout']['height']}px"
        return tag("div", id=name, class_="figure", role="img", aria_label=said, style=height)


def sections_of(subject: Subject, drawn: Drawn) -> Iterator[str]:
    """All sections for which there is something to show."""
    yield _head(subject)
    if subject.run is not None or subject.metrics:
        yield from _run(subject, drawn)
    if subject.comparison is not None:
        yield _comparison(subject.comparison)
    if subject.estimate is not None:
        yield from _estimate(subject, drawn)
    if subject.grid is not None and subject.workload is not None:
        yield _grid(subject, drawn)
    if subject.plan is not None:
        yield from _plan(subject.plan, drawn)
    yield _environment(subject)


def _head(subject: Subject) -> str:
    estimate, run = subject.estimate, subject.run
    parts = []
    if run is not None:
        parts.append(tag("p", text(f"{run.model} · {run.task} · on {run.device}"), class_="quiet"))
        best = "" if run.best_value is None else f", {run.best_metric} {run.best_value:.4f}"
        parts.append(tag("h1", text(f"{counted(run.num_steps, 'step')}, {run.status}{best}")))
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
        agrees = "agree" if subject.comparison.agrees else "do not agree"
        parts.append(tag("h1", text(f"Prediction and measurement {agrees}: {worst} off at worst")))
    else:
        parts.append(tag("h1", text("A run that is not finished")))
    if estimate is not None:
        parts.append(estimate_bar(estimate))
    parts += [tag("p", text(_sentence(note)), class_="note") for note in subject.notes]
    return tag("section", *parts, class_="card head")


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:].rstrip('.')}."


def _run(subject: Subject, drawn: Drawn) -> Iterator[str]:
    if subject.run is not None:
        yield section("What it took", table((), _run_rows(subject.run)))
    train = [line for line in subject.metrics if line.get("kind") == "train"]
    evaluated = [line for line in subject.metrics if line.get("kind") == "eval"]
    losses = _curves({"training": (train, "loss"), "evaluation": (evaluated, "loss")})
    scores = {name: (evaluated, name) for name in _score_names(evaluated)}
    speed = _curves({"tokens a second": (train, "tokens_per_s")})
    reserved = _curves({"reserved": (train, "reserved_bytes")}, scale=1 / GIB)
    budget = None if subject.run is None or subject.run.budget_bytes is None else subject.run.budget_bytes / GIB
    wanted = [
        ("loss", losses, "Loss", "loss", None),
        ("scores", _curves(scores), "What it reached", figures.SCORE, None),
        ("speed", speed, "Throughput", "tokens/s", None),
        ("reserved", reserved, "Reserved peak so far", "GiB", budget),
    ]
    made = [
        tag("div", tag("h3", text(title)), drawn.place(name, figures.curve(lines, unit, limit=limit), title))
        for name, lines, title, unit, limit in wanted
        if lines
    ]
    if made:
        yield section("How it went", tag("div", *made, class_="grid"))


def _score_names(evaluated: list[Mapping[str, Any]]) -> list[str]:
    last = evaluated[-1] if evaluated else {}
    return [name for name, value in last.items() if isinstance(value, float) and name not in PLAIN][:6]


def _curves(
    wanted: Mapping[str, tuple[list[Mapping[str, Any]], str]], *, scale: float = 1.0
) -> dict[str, tuple[list[int], list[float]]]:
    found = {}
    for name, (lines, key) in wanted.items():
        points = [(line["step"], line[key] * scale) for line in lines if isinstance(line.get(key), int | float)]
        if points:
            found[name] = ([step for step, _ in points], [value for _, value in points])
    return found


def _run_rows(r: RunRecord) -> Iterator[tuple[str, str]]:
    yield "settings", ", ".join(f"{name} {value}" for name, value in r.settings.items())
    yield "data", f"{counted(r.num_samples, 'sample')}, {counted(r.num_epochs, 'epoch')}, {r.num_tokens:,} tokens"
    yield "time", f"{r.time_s:,.1f} s, {r.tokens_per_s:,.0f} tokens/s"
    if r.step_time_s is not None:
        predicted = "" if r.predicted_step_time_s is None else f"; predicted {1000 * r.predicted_step_time_s:,.1f} ms"
        yield "a step", f"{1000 * r.step_time_s:,.1f} ms{predicted}"
    if r.measured_reserved_bytes is not None:
        yield "reserved peak", reserved_peak(r)
    if r.measured_allocated_bytes is not None:
        yield "allocated peak", format_bytes(r.measured_allocated_bytes)
    yield "out of memory", f"{r.num_recoveries:,} times, and nothing was lost" if r.num_recoveries else "never"
    yield "saved in", r.output
    for note in r.notes:
        yield "note", note


def _estimate(subject: Subject, drawn: Drawn) -> Iterator[str]:
    estimate = subject.estimate
    assert estimate is not None
    shown, course = subject.course_estimate or estimate, subject.course
    about = "Predicted, stacked by what it is."
    if course is not None and subject.course_estimate is not None:
        about = _beside(subject.course_estimate, course)
    place = drawn.place("timeline", timeline(shown, course if subject.course_estimate else None), about)
    yield section("One step, from left to right", place, about=about)
    when = f"{format_bytes(estimate.peak_allocated_bytes)} allocated, {peak_moment(estimate.peak, estimate.workload)}."
    tree = drawn.place("modules", figures.icicle(estimate), "What is alive at the peak, by module")
    yield section("Alive at the peak, by module", tree, about=f"{when} Click a module to look inside.")
    rows = [
        (phase_name(name, estimate.workload), *(format_bytes(getattr(p, f"peak_{figure}_bytes")) for figure in FIGURES))
        for name, p in estimate.phases.items()
    ]
    yield section("Phases", figures_row(estimate), table(("", *FIGURES), rows, right=(1, 2, 3)))


FIGURES = ("requested", "allocated", "reserved")


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
        (r.setting, KIND_WORDS[r.kind], f"{_sentence(r.why)}{f' Costs in quality: {r.cost}.' if r.cost else ''}")
        for r in plan.reasons
    ]
    about = (
        f"Passes of {plan.micro_batch}, {plan.accumulate} a step, about {plan.step_time_s:.3g} s a step; evaluation in "
        f"batches of {plan.evaluation_batch}. {_sentence(plan.margin_reason)}"
    )
    commands = [train_command(plan.workload, "plan.json")] if plan.workload.task in TRAINED_TASKS else []
    commands.append(estimate_command(plan.workload))
    shown = "".join(tag("pre", text(command)) for command in commands)
    yield section("The plan", table(("Setting", "Class", "Why"), rows), shown, about=about)
    if plan.alternatives:
        place = drawn.place("alternatives", figures.alternatives(plan), "Memory against time of the alternatives")
        others = [
            (
                a.settings,
                f"{a.micro_batch} × {a.accumulate}",
                f"{a.step_time_s:.3g} s",
                format_bytes(a.safe_reserved_bytes),
                f"fits{f'; not taken: {a.why_not}' if a.why_not else ''}" if a.fits else "does not fit",
            )
            for a in plan.alternatives
        ]
        head = ("Settings", "passes", "a step", "reserved", "")
        yield section("What else was possible", place, table(head, others, right=(1, 2, 3)))


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
    return section("Predicted beside measured", table(head, rows, right=(2, 3, 4, 5)), about=about)


def _environment(subject: Subject) -> str:
    rows = [(name, value) for name, value in subject.environment.items()]
    e = subject.estimate
    if e is not None:
        basis = "compared with measurements" if e.basis == "verified" else "rules carried over from a measured GPU"
        rows += [("predicted for", target(e)), ("basis", f"{e.basis}: {basis}")]
        rows += [("note", _sentence(note)) for note in e.notes]
    return section("Environment and versions", table((), rows))
