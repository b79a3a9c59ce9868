"""A watched program for the terminal: live while it runs, and what it came to at the end."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vramfit.records.watch import WATCH_PHASES, MemorySample, PhaseUse, WatchRecord, layers_together, origin_words
from vramfit.report.charts import MIN_WIDTH, Meter
from vramfit.report.estimate import FIGURES
from vramfit.report.findings import render_findings
from vramfit.report.words import percent, size

MAX_LARGEST = 10


def render_live(record: WatchRecord) -> RenderableType:
    """A few lines that are redrawn while a program runs."""
    sample = record.samples[-1] if record.samples else None
    parts: list[RenderableType] = [_headline(record, sample)]
    if sample is not None:
        parts.append(_meters(record, sample))
    parts += _phases(record)
    parts += [
        Text(f"! {finding.as_finding().what}", style="yellow", overflow="ellipsis", no_wrap=True)
        for finding in record.findings[:3]
    ]
    return Group(*parts)


def render_watch(record: WatchRecord) -> RenderableType:
    """What a program came to."""
    parts: list[RenderableType] = [_headline(record, None)]
    if record.phases:
        parts += [*_phases(record), *_counters(record)]
    if record.largest:
        parts += [Text(), Text("Largest, when most was held at the end of a phase", style="bold")]
        parts += [_line(size(g.num_bytes), origin_words(g)) for g in layers_together(record.largest)[:MAX_LARGEST]]
    if record.findings:
        parts += [Text(), render_findings([finding.as_finding() for finding in record.findings])]
    parts += [Padding(Text(f"{note[:1].upper()}{note[1:]}.", style="dim")) for note in record.notes]
    return Group(*parts)


def _line(figure: str, words: str) -> Text:
    return Text.assemble((f"  {figure:>11}", "bold"), f"  {words}")


def _headline(record: WatchRecord, sample: MemorySample | None) -> Text:
    of = f" of {size(record.capacity_bytes)}" if record.capacity_bytes else ""
    mode = "in detail" if record.detailed else "light"
    words = [f"{record.device}{of}", mode, f"{record.time_s:.0f} s"]
    words += [f"step {record.num_steps:,}"] if record.num_steps else []
    words += [f"{record.num_forwards:,} forward passes"] if record.num_forwards else []
    words += [f"now {sample.phase}"] if sample is not None else []
    return Text.assemble(("vramfit watch", "bold"), f"  {' · '.join(words)}")


def _meters(record: WatchRecord, sample: MemorySample) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for justify in ("left", "right", "right"):
        grid.add_column(justify=justify, no_wrap=True)
    grid.add_column(ratio=1, min_width=MIN_WIDTH, max_width=40)
    grid.add_column(no_wrap=True)
    on_host = record.device in ("cpu", "emulated")
    kinds = FIGURES[:-1] if on_host else FIGURES
    peak = max((getattr(record, f"peak_{kind}_bytes") or 0 for kind, _ in kinds), default=0)
    scale = max(record.capacity_bytes or 0, peak, 1)
    for kind, meaning in kinds:
        value = getattr(sample, f"{kind}_bytes")
        if value is not None:
            bar = Meter(value=min(value, scale), limit=scale, scale=scale)
            grid.add_row(f"  {kind}", Text(size(value), "bold"), percent(value, scale), bar, Text(meaning, "dim"))
    if on_host and sample.process_bytes is not None:
        grid.add_row("  process", Text(size(sample.process_bytes), "bold"), "", "", Text("host memory", "dim"))
    return grid


def _phases(record: WatchRecord) -> Iterator[RenderableType]:
    if record.peak_requested_bytes is None:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("peaks", no_wrap=True)
    for name in ("requested", "allocated", "reserved", "times", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in WATCH_PHASES:
        use = record.phases.get(phase)
        if use is not None:
            table.add_row(phase, *_figures(use), f"{use.num_times:,}", f"{use.time_s:.1f}")
    whole = PhaseUse(
        num_times=0,
        time_s=record.time_s,
        peak_requested_bytes=record.peak_requested_bytes,
        peak_allocated_bytes=record.peak_allocated_bytes,
        peak_reserved_bytes=record.peak_reserved_bytes,
    )
    table.add_row("all", *_figures(whole), "", f"{record.time_s:.1f}", style="bold")
    yield table


def _figures(use: PhaseUse) -> Iterator[str]:
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
        text = ", ".join(words)
        yield Text(f"{text[:1].upper()}{text[1:]}.", style="dim")
    if record.peak_allocated_bytes is not None and not record.detailed:
        yield Text("Peaks of single phases are lower bounds in light mode; of all, exact.", style="dim")
