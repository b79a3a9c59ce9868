"""Findings for the terminal: what was found, why it matters, what to do; out-of-memory messages explained; programs
that are watched."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from vramfit.records.finding import Finding, Severity
from vramfit.records.watch import (
    WATCH_PHASES,
    Explanation,
    Holding,
    MemorySample,
    PhaseUse,
    WatchRecord,
    layers_together,
    origin_words,
)
from vramfit.report.charts import Meter, for_width, grid, indented, marked, table
from vramfit.report.estimate import FIGURES
from vramfit.report.words import percent, sentence, size
from vramfit.units import counted

MARKS: dict[Severity, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "info": ("·", "cyan"),
    "warning": ("!", "yellow"),
    "error": ("✗", "red"),
}
CAUSES = {
    "one request": "one impossible request",
    "limit": "a limit set for this process",
    "other process": "other processes on the GPU",
    "fragmentation": "fragmentation",
    "job": "the job is too large for this GPU",
    "free but refused": "memory that was free, and yet refused",
    "host": "the host's memory, not the GPU's",
    "unknown": "the message does not say",
}
MAX_LARGEST = 10
WIDTH_WITH_BARS = 100
"""Columns from which there is room for bars."""


def render_findings(findings: Sequence[Finding]) -> RenderableType:
    """One block a finding; the fix last, where the eye stops."""
    lines: list[RenderableType] = []
    for finding in findings:
        mark, style = MARKS[finding.severity]
        lines.append(marked(mark, Text(finding.what, "bold" if style == "red" else ""), style))
        if finding.why:
            lines.append(indented(finding.why))
        if finding.fix:
            lines.append(indented(f"→ {finding.fix}", ""))
    return Group(*lines)


def summarize(findings: Sequence[Finding]) -> str:
    """One line: how many of each that need attention."""
    num_errors = sum(f.severity == "error" for f in findings)
    num_warnings = sum(f.severity == "warning" for f in findings)
    if not num_errors and not num_warnings:
        return "No problems found."
    found = ((num_errors, "error"), (num_warnings, "warning"))
    return " and ".join(counted(count, word) for count, word in found if count) + "."


def render_explanation(explanation: Explanation) -> RenderableType:
    """The answer first, then the figures it rests on."""
    m = explanation.message
    which = f"line {m.line:,}"
    if explanation.num_messages > 1:
        which += f", the one that says most of {explanation.num_messages:,} out-of-memory messages"
    parts: list[RenderableType] = [
        Text.assemble(("Out of memory: ", "bold"), (CAUSES[explanation.cause], "bold red")),
        Text(explanation.headline),
        Text(f"{which}: {m.text}", style="dim"),
        Text(),
        *_holdings(explanation),
        render_findings(explanation.findings),
    ]
    if explanation.no_plan is not None:
        parts += [Text(), Text("No plan", style="bold red"), indented(explanation.no_plan, "")]
    return Group(*parts)


def gpu_of_plan(explanation: Explanation) -> str | None:
    """Which GPU the plan is for, where the message did not leave just one."""
    total_bytes, alike = explanation.message.total_bytes, explanation.gpus_alike
    if alike:
        others = " and ".join(alike)
        has = "have" if len(alike) > 1 else "has"
        return f"The plan is for {explanation.gpu}; {others} {has} as much memory: --gpu says which it was."
    if explanation.gpu is None and total_bytes is not None and explanation.plan is not None:
        near = explanation.plan.workload.gpu
        what = f"{near}, whose memory is nearest" if near else "the memory alone"
        return f"No GPU of the catalogue has {size(total_bytes)}: the plan is for {what}; --gpu says which it was."
    return None


def _holdings(explanation: Explanation) -> Iterator[RenderableType]:
    holdings = explanation.holdings
    if not holdings:
        return
    total = explanation.message.total_bytes or sum(h.num_bytes for h in holdings) or 1
    names = [explanation.gpu, *explanation.gpus_alike] if explanation.gpu else []
    gpu = f" (as a {' or a '.join(names)} has)" if names else ""
    yield Text(f"Where {size(total)}{gpu} were", style="bold")
    yield _shares(holdings, total)
    yield Text()


@for_width
def _shares(width: int, holdings: Sequence[Holding], total: int) -> Iterator[RenderableType]:
    """What held the memory of a GPU: figures and words; bars where there is room for them."""
    has_bars = width >= WIDTH_WITH_BARS
    rows = grid("left", "right", "right", *(["bar"] if has_bars else []), None, bar=40)
    for h in holdings:
        bar = [Meter(value=min(h.num_bytes, total), limit=total, scale=total)] if has_bars else []
        rows.add_row(f"  {h.name}", Text(size(h.num_bytes), "bold"), percent(h.num_bytes, total), *bar, h.who)
    yield rows


def render_live(record: WatchRecord) -> RenderableType:
    """A few lines that are redrawn while a program runs."""
    sample = record.samples[-1] if record.samples else None
    parts: list[RenderableType] = [_watched(record, sample)]
    if sample is not None:
        parts.append(_meters(record, sample))
    parts += _phases(record)
    parts += [
        Text(f"! {finding.as_finding().what}", style="yellow", overflow="ellipsis", no_wrap=True)
        for finding in record.findings[:3]
    ]
    return Group(*parts)


def render_watch(record: WatchRecord) -> RenderableType:
    """The summary of a watched program."""
    parts: list[RenderableType] = [_watched(record, None)]
    if record.phases:
        parts += [*_phases(record), *_counters(record)]
    if record.largest:
        parts += [Text(), Text("Largest, when most was held at the end of a phase", style="bold")]
        parts += [_line(size(g.num_bytes), origin_words(g)) for g in layers_together(record.largest)[:MAX_LARGEST]]
    if record.findings:
        parts += [Text(), render_findings([finding.as_finding() for finding in record.findings])]
    parts += [Text(sentence(note), style="dim") for note in record.notes]
    return Group(*parts)


def _line(figure: str, words: str) -> Text:
    return Text.assemble((f"  {figure:>11}", "bold"), f"  {words}")


def _watched(record: WatchRecord, sample: MemorySample | None) -> Text:
    of = f" of {size(record.capacity_bytes)}" if record.capacity_bytes else ""
    mode = "in detail" if record.detailed else "light"
    words = [f"{record.device}{of}", mode, f"{record.time_s:.0f} s"]
    words += [f"step {record.num_steps:,}"] if record.num_steps else []
    words += [f"{record.num_forwards:,} forward passes"] if record.num_forwards else []
    words += [f"now {sample.phase}"] if sample is not None else []
    return Text.assemble(("vramfit watch", "bold"), f"  {' · '.join(words)}")


def _meters(record: WatchRecord, sample: MemorySample) -> RenderableType:
    rows = grid("left", "right", "right", "bar", "left", bar=40)
    on_host = record.device in ("cpu", "emulated")
    kinds = FIGURES[:-1] if on_host else FIGURES
    peak = max((getattr(record, f"peak_{kind}_bytes") or 0 for kind, _ in kinds), default=0)
    scale = max(record.capacity_bytes or 0, peak, 1)
    for kind, meaning in kinds:
        value = getattr(sample, f"{kind}_bytes")
        if value is not None:
            bar = Meter(value=min(value, scale), limit=scale, scale=scale)
            rows.add_row(f"  {kind}", Text(size(value), "bold"), percent(value, scale), bar, Text(meaning, "dim"))
    if on_host and sample.process_bytes is not None:
        rows.add_row("  process", Text(size(sample.process_bytes), "bold"), "", "", Text("host memory", "dim"))
    return rows


def _phases(record: WatchRecord) -> Iterator[RenderableType]:
    if record.peak_requested_bytes is None:
        return
    numbers = ("requested", "allocated", "reserved", "times", "seconds")
    rows = table("peaks", *numbers, right=numbers)
    for phase in WATCH_PHASES:
        use = record.phases.get(phase)
        if use is not None:
            rows.add_row(phase, *_figures(use), f"{use.num_times:,}", f"{use.time_s:.1f}")
    rows.add_row("all", *_figures(record), "", f"{record.time_s:.1f}", style="bold")
    yield rows


def _figures(use: PhaseUse | WatchRecord) -> Iterator[str]:
    for value in (use.peak_requested_bytes, use.peak_allocated_bytes, use.peak_reserved_bytes):
        yield "–" if value is None else size(value)


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count:,} times")


def _counters(record: WatchRecord) -> Iterator[RenderableType]:
    shares = [s.fragmentation for s in record.samples if s.fragmentation is not None]
    words = [f"up to {max(shares):.0%} of what was reserved was in no block"] if shares else []
    if record.peak_reserved_bytes is not None:
        words.append(f"the allocator freed its cache to make room {_times(record.num_retries)}")
        words.append(f"out of memory {_times(record.num_ooms)}")
    if record.peak_process_bytes is not None:
        words.append(f"the process held {size(record.peak_process_bytes)}")
    if words:
        yield Text(sentence(", ".join(words)), style="dim")
    if record.peak_allocated_bytes is not None and not record.detailed:
        yield Text("Peaks of single phases are lower bounds in light mode; of all, exact.", style="dim")
