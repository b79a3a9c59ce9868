"""Findings for the terminal: a mark, what was found, why it matters, what to do."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vramfit.records.finding import Finding, Severity

MARKS: dict[Severity, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "info": ("·", "cyan"),
    "warning": ("!", "yellow"),
    "error": ("✗", "red"),
}


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
