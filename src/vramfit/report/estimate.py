"""One estimate for the terminal: does it fit, the four numbers, what is in memory at the peak, and when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from vramfit.records.estimate import HOST_STEP, PHASES, Advice, Estimate
from vramfit.report.advice import render_advice
from vramfit.report.bars import MIN_WIDTH, Meter, Timeline
from vramfit.report.peak import Largest, render_peak
from vramfit.report.verdict import COLD, verdict_of
from vramfit.report.words import NO_BREAK, duration, job, model_name, percent, phase_name, size, target, unbroken

MAX_WIDTH = 120
"""Wider than this, bars say no more and lines are hard to follow."""
WIDE = 100
FIGURES = (
    ("requested", "asked for by tensors"),
    ("allocated", "in blocks handed out"),
    ("reserved", "in segments held"),
    ("process", "with the CUDA context"),
)
VERDICT_MARKS = {
    "good": ("✓", "bold green"),
    "tight": ("✓", "bold green"),
    "bad": ("✗", "bold red"),
    "open": ("·", "bold"),
}
BASIS = {
    "verified": "Verified: this torch on this architecture was compared with measurements.",
    "derived": "Derived: rules carried over from a measured GPU; keep a few percent spare.",
}

TIME_BASIS = {"catalogue": " · catalogue rates", "calibrated": " · calibrated"}


@dataclass(frozen=True)
class Sized:
    """Lines that are made for the width there is, up to `MAX_WIDTH`."""

    parts: Sequence[RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(width=min(options.max_width, MAX_WIDTH))
        for part in self.parts:
            for text, style, control in console.render(part, options):
                # lines are broken by now: what is copied or searched for has plain spaces
                yield Segment(text.replace(NO_BREAK, " "), style, control)


def render_estimate(estimate: Estimate, advice: Sequence[Advice] | None = None) -> RenderableType:
    """Everything about one estimate; `advice` None leaves that part out."""
    parts = [
        render_headline(estimate),
        Text(),
        render_verdict(estimate),
        Text(),
        Figures(estimate),
        Text(),
        *render_peak(estimate),
        Text(),
        Largest(estimate),
        Text(),
        *_step(estimate),
        _phases(estimate),
        *_time(estimate),
        *([] if advice is None else [Text(), render_advice(advice, estimate)]),
        Text(),
        *render_remarks(estimate),
    ]
    return Sized(parts)


def render_headline(estimate: Estimate, *, batch: bool = True, seq: bool = True) -> RenderableType:
    """What was asked, in two lines."""
    w = estimate.workload
    first = Text.assemble((model_name(w.model), "bold"), f" · {w.task} · {w.mode}", overflow="fold")
    phrases = (p.replace(" ", NO_BREAK) for p in [*job(w, batch=batch, seq=seq), target(estimate)])
    return Group(first, Text(f"{NO_BREAK}· ".join(phrases), style="dim"))


def render_verdict(estimate: Estimate, what: str = "Does not fit", *, says_cold: bool = True) -> RenderableType:
    """The verdict of `verdict_of`; `says_cold` False leaves out what a first matrix product costs."""
    verdict = verdict_of(estimate, what)
    mark, style = VERDICT_MARKS[verdict.tone]
    lines: list[RenderableType] = [Text(unbroken(f"{mark} {verdict.headline}."), style=style)]
    lines += [_indented(unbroken(fact)) for fact in verdict.facts]
    if verdict.tone == "open":
        lines.append(_indented("--gpu or --memory would tell."))
    lines += [marked("!", warning, "yellow") for warning in verdict.warnings if says_cold or warning != COLD]
    return Group(*lines)


def marked(mark: str, text: str, style: str) -> RenderableType:
    """A remark behind a mark; further lines hang below the text, not below the mark."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text(mark, style=style), Text(text))
    return grid


def _indented(text: str, style: str = "dim") -> RenderableType:
    return Padding(Text(text, style=style), (0, 0, 0, 2))


@dataclass(frozen=True)
class Figures:
    """The four numbers, each with its share of the GPU's memory, or of the memory that was given."""

    estimate: Estimate

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        e, wide = self.estimate, options.max_width >= WIDE
        given = e.workload.memory is not None
        limit = e.capacity_bytes if given else e.total_memory_bytes or e.capacity_bytes
        scale = max(limit or 0, e.peak_process_bytes)
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for justify in ("left", "right", "right"):
            grid.add_column(justify=justify, no_wrap=True)
        grid.add_column(ratio=1, min_width=MIN_WIDTH)
        grid.add_column(no_wrap=True)
        for name, meaning in FIGURES:
            value: int = getattr(e, f"peak_{name}_bytes")
            outside = given and name == "process"  # memory= is the allocator's; the context comes on top
            of = percent(value, limit) if limit and not outside else ""
            style = "bold" if name == "allocated" else ""
            bar = Meter(value=value, limit=scale if outside or not limit else limit, scale=scale)
            exact = f"{meaning:<21} {value:>15,} B" if wide else meaning
            grid.add_row(Text(name, style), Text(size(value), style), of, bar, Text(exact, "dim"))
        yield grid


def _step(estimate: Estimate) -> Iterator[RenderableType]:
    if not estimate.timeline:
        return
    name = "A steady step" if estimate.workload.trains else "A later batch"
    top = max(point.allocated_bytes for point in estimate.timeline)
    yield Text.assemble((name, "bold"), f" from its first request to its last; the top is {size(top)}")
    yield Timeline(points=estimate.timeline)
    yield Text()


def _phases(estimate: Estimate) -> RenderableType:
    grid = Table.grid(padding=(0, 3, 0, 0))
    headers = ("Peak of each phase", "requested", "allocated", "reserved")
    for justify in ("left", "right", "right", "right"):
        grid.add_column(justify=justify, no_wrap=True)
    grid.add_row(*(Text(header, style="bold") for header in headers))
    known = [name for name in PHASES if name in estimate.phases]
    for name in [*known, *(n for n in estimate.phases if n not in known)]:
        phase = estimate.phases[name]
        figures = (phase.peak_requested_bytes, phase.peak_allocated_bytes, phase.peak_reserved_bytes)
        grid.add_row(phase_name(name, estimate.workload), *map(size, figures))
    return grid


def _time(estimate: Estimate) -> Iterator[RenderableType]:
    """How long a step takes, what limits it, and how that was found."""
    if estimate.step_time_s is None:
        return
    name = "step" if estimate.workload.trains else "batch"
    host_s = estimate.time_breakdown.get("host", 0.0)
    waits_s = estimate.time_breakdown.get(HOST_STEP, 0.0)
    gpu_s = sum(estimate.time_breakdown.values()) - host_s - waits_s
    stepped = f", optimizer in host memory {duration(waits_s)}" if waits_s else ""
    busy = f" (GPU busy {duration(gpu_s)}, host {duration(host_s)}{stepped})" if estimate.time_breakdown else ""
    basis = TIME_BASIS.get(estimate.time_basis or "", "")
    yield Text()
    yield Text.assemble(
        ("Step time", "bold"), f"  about {duration(estimate.step_time_s)} a {name}{busy}", (basis, "dim")
    )


def render_remarks(estimate: Estimate) -> Iterator[RenderableType]:
    """Notes, and how sure the prediction is, where no note says so."""
    for note in estimate.notes:
        yield marked("!", note, "yellow")
    if not any(note.lower().startswith(estimate.basis) for note in estimate.notes):
        yield Text(BASIS[estimate.basis], style="dim")
