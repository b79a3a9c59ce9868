"""Findings, and out-of-memory messages explained, for the terminal: what was found, why it matters, what to do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vramfit.records.explanation import Explanation, Holding
from vramfit.records.finding import Finding, Severity
from vramfit.report.charts import MIN_WIDTH, Meter
from vramfit.report.words import percent, size

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
WIDTH_WITH_BARS = 100
"""Columns from which bars tell more than the percentage beside them, and leave the words whole."""


def render_findings(findings: Sequence[Finding]) -> RenderableType:
    """One block a finding; the fix last, where the eye stops."""
    lines: list[RenderableType] = []
    for finding in findings:
        mark, style = MARKS[finding.severity]
        found = Table.grid(padding=(0, 1, 0, 0))  # further lines hang below the text, not below the mark
        found.add_row(Text(mark, style), Text(finding.what, "bold" if style == "red" else ""))
        lines.append(found)
        if finding.why:
            lines.append(Padding(Text(finding.why, style="dim"), (0, 0, 0, 2)))
        if finding.fix:
            lines.append(Padding(Text(f"→ {finding.fix}"), (0, 0, 0, 2)))
    return Group(*lines)


def summarize(findings: Sequence[Finding]) -> str:
    """One line: how many of each that need attention."""
    num_errors = sum(f.severity == "error" for f in findings)
    num_warnings = sum(f.severity == "warning" for f in findings)
    if not num_errors and not num_warnings:
        return "Nothing stands in the way."
    parts = [
        f"{count} {word}{'s' if count > 1 else ''}"
        for count, word in ((num_errors, "error"), (num_warnings, "warning"))
        if count
    ]
    return " and ".join(parts) + "."


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
        parts += [Text(), Text("No plan", style="bold red"), Padding(Text(explanation.no_plan), (0, 0, 0, 2))]
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
    yield _Shares(holdings, total)
    yield Text()


@dataclass(frozen=True)
class _Shares:
    """Who held what of a GPU: figures and words; bars where there is room for them."""

    holdings: Sequence[Holding]
    total_bytes: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total, has_bars = self.total_bytes, options.max_width >= WIDTH_WITH_BARS
        grid = Table.grid(padding=(0, 2, 0, 0), expand=has_bars)
        for justify in ("left", "right", "right"):
            grid.add_column(justify=justify, no_wrap=True)
        if has_bars:
            grid.add_column(ratio=1, min_width=MIN_WIDTH, max_width=40)
        grid.add_column()
        for h in self.holdings:
            bar = [Meter(value=min(h.num_bytes, total), limit=total, scale=total)] if has_bars else []
            grid.add_row(f"  {h.name}", Text(size(h.num_bytes), "bold"), percent(h.num_bytes, total), *bar, h.who)
        yield grid
