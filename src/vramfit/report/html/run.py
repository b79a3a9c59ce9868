"""The sections of a run: what it took, and how it went."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vramfit.records.run import RunRecord
from vramfit.report.html import figures
from vramfit.report.html.marks import Drawn, Figure
from vramfit.report.html.markup import section, table, tag, text
from vramfit.report.html.subject import Subject
from vramfit.report.words import duration, reserved_peak, run_time
from vramfit.units import GIB, counted, format_bytes

PLAIN = ("step", "epoch", "kind", "loss")
"""Of an evaluation's line: what is no score."""
MIN_POINTS = 3
"""Fewer make no curve, and stand in a table."""
Lines = dict[str, tuple[list[int], list[float]]]
"""Name → steps and values."""


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
    yield "saved in", r.output
    for note in r.notes:
        yield "note", note
