"""One estimate for the terminal: does it fit, the four numbers, what is in memory at the peak, and what would help."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from vramfit.records.estimate import CATEGORIES, HOST_STEP, PHASES, Advice, Estimate
from vramfit.report.charts import (
    MIN_WIDTH,
    Meter,
    StackedBar,
    Timeline,
    category_mark,
    for_width,
    grid,
    has_colour,
    indented,
    marked,
    table,
    with_paths,
)
from vramfit.report.words import (
    COLD,
    NO_BREAK,
    OUTSIDE,
    duration,
    group_name,
    job,
    model_name,
    peak_moment,
    peak_place,
    percent,
    phase_name,
    size,
    target,
    unbroken,
    verdict_of,
)

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
    "outside": OUTSIDE,
}

TIME_BASIS = {"catalogue": " · catalogue rates", "calibrated": " · calibrated"}
MAX_GROUPS = 6
MAX_EACH = 4
KIND_TITLES = {
    "free": "The same maths",
    "numeric": "The same job in another precision",
    "different training": "Different training: something else is learned",
}
AT_PART = {"optimizer": " at the step", "forward": " in forward", "backward": " in backward"}


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
        four_figures(estimate),
        Text(),
        *render_peak(estimate),
        Text(),
        _largest(estimate),
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
    lines += [indented(unbroken(fact)) for fact in verdict.facts]
    if verdict.tone == "open":
        lines.append(indented("--gpu or --memory would tell."))
    lines += [marked("!", warning, "yellow") for warning in verdict.warnings if says_cold or warning != COLD]
    return Group(*lines)


@for_width
def four_figures(width: int, e: Estimate) -> Iterator[RenderableType]:
    """The four numbers, each with its share of the GPU's memory, or of the memory that was given."""
    given = e.workload.memory is not None
    limit = e.capacity_bytes if given else e.total_memory_bytes or e.capacity_bytes
    scale = max(limit or 0, e.peak_process_bytes)
    rows = grid("left", "right", "right", "bar", "left")
    for name, meaning in FIGURES:
        value: int = getattr(e, f"peak_{name}_bytes")
        outside = given and name == "process"  # memory= is the allocator's; the context comes on top
        of = percent(value, limit) if limit and not outside else ""
        style = "bold" if name == "allocated" else ""
        bar = Meter(value=value, limit=scale if outside or not limit else limit, scale=scale)
        exact = f"{meaning:<21} {value:>15,} B" if width >= WIDE else meaning
        rows.add_row(Text(name, style), Text(size(value), style), of, bar, Text(exact, "dim"))
    yield rows


def _step(estimate: Estimate) -> Iterator[RenderableType]:
    if not estimate.timeline:
        return
    name = "A steady step" if estimate.workload.trains else "A later batch"
    top = max(point.allocated_bytes for point in estimate.timeline)
    yield Text.assemble((name, "bold"), f" from its first request to its last; the top is {size(top)}")
    yield Timeline(points=estimate.timeline)
    yield Text()


def _phases(estimate: Estimate) -> RenderableType:
    figures = [name for name, _ in FIGURES[:-1]]
    rows = table("Peak of each phase", *figures, right=figures, gap=3)
    known = [name for name in PHASES if name in estimate.phases]
    for name in dict.fromkeys([*known, *estimate.phases]):
        peaks = (getattr(estimate.phases[name], f"peak_{figure}_bytes") for figure in figures)
        rows.add_row(phase_name(name, estimate.workload), *map(size, peaks))
    return rows


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


def render_peak(estimate: Estimate) -> Iterator[RenderableType]:
    """What is in memory at the peak, and the moment of it."""
    shares: dict[str, int] = {category: estimate.breakdown.get(category, 0) for category in CATEGORIES}
    when = peak_moment(estimate.peak, estimate.workload)
    yield Text.assemble(("At the peak", "bold"), f": {size(sum(shares.values()))} allocated, {when}")
    yield StackedBar(shares)
    yield _Legend(shares)
    place = peak_place(estimate.peak)
    if place:
        yield Text(place, style="dim")


@dataclass(frozen=True)
class _Legend:
    """Each category with its mark, size and share; in as many columns as fit."""

    shares: dict[str, int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total = sum(self.shares.values())
        present = [(name, num_bytes) for name, num_bytes in self.shares.items() if num_bytes]
        cells = []
        for name, num_bytes in present:
            glyph, style = category_mark(name, colour=has_colour(console))
            text = f" {name:<12}{size(num_bytes):>11} {percent(num_bytes, total):>5}"
            cells.append(Text.assemble((glyph * 2, style), text, no_wrap=True))
        num_columns = max(1, min(3, (options.max_width + 4) // 37))
        num_rows = ceil(len(cells) / num_columns)
        rows = grid(gap=4)
        for row in range(num_rows):
            rows.add_row(*cells[row::num_rows])
        yield rows


@for_width
def _largest(width: int, estimate: Estimate) -> Iterator[RenderableType]:
    """The largest groups of blocks at the peak: what they are and where they come from."""
    if not estimate.groups:
        return
    yield Text("Largest at the peak", style="bold")
    rows = []
    for g in estimate.groups[:MAX_GROUPS]:
        share = percent(g.allocated_bytes, estimate.peak_allocated_bytes)
        rows.append(((size(g.allocated_bytes), share, f"{g.num_blocks:,} ×", group_name(g)), g.module, ""))
    yield with_paths(width, rows, least=MIN_WIDTH)


def render_advice(advice: Sequence[Advice], estimate: Estimate) -> RenderableType:
    """Changes by what they cost, in each kind the most saved first; the best of all stands out."""
    saving = [a for a in advice if a.saved_bytes > 0]
    if not saving:
        return Text("No single change makes the peak smaller.")
    best = max(saving, key=lambda a: a.saved_bytes)
    when = AT_PART.get(estimate.peak.part, "")
    lines = [Text("What one change would save", style="bold")]
    for kind, title in KIND_TITLES.items():
        of_kind = [a for a in saving if a.kind == kind][:MAX_EACH]
        if of_kind:
            lines.append(Text(title, style="dim"))
        for change in of_kind:
            name = f"  {change.change:<{max(len(a.change) for a in saving)}}"
            saved = f"  saves {size(change.saved_bytes):>10}{when}"
            left = f"  → {size(change.peak_allocated_bytes):>10}  "
            lines.append(
                Text.assemble((name, "bold" if change is best else ""), saved, left, _verdict(change, estimate))
            )
    if any(a.change.startswith("attention packed") for a in saving):
        steps = "; training with it is for --loop stepper" if estimate.workload.trains else ""
        lines.append(Text(f"Packed attention has no mask, which takes {size(estimate.mask_bytes)} here{steps}."))
    return Group(*lines)


def _verdict(change: Advice, estimate: Estimate) -> Text:
    """Said only where the change decides: it fits now, or it still does not."""
    if change.fits is None or (change.fits and estimate.fits):
        return Text()
    return Text("✓ fits", style="green") if change.fits else Text("✗ too much", style="red")
