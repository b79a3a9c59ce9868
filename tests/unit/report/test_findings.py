from rich.console import Console
from tests.unit.report.samples import drawn

from vramfit.records.finding import Finding
from vramfit.report.findings import render_findings, summarize

FINDINGS = [
    Finding(check="a", severity="ok", what="fine"),
    Finding(check="b", severity="error", what="broken [bold]", why="because", fix="mend it"),
    Finding(check="c", severity="warning", what="hm"),
]


def test_what_why_and_fix_are_shown_and_markup_is_left_alone() -> None:
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_findings(FINDINGS))
    text = console.export_text()
    assert "✗ broken [bold]" in text
    assert "because" in text
    assert "→ mend it" in text


def test_the_summary_counts_what_needs_attention() -> None:
    assert summarize(FINDINGS) == "1 error and 1 warning."
    assert summarize(FINDINGS[:1]) == "Nothing stands in the way."


def test_a_long_finding_hangs_below_its_text() -> None:
    finding = Finding(check="a", severity="info", what="word " * 30)
    first, second, *_ = drawn(render_findings([finding]), 60).splitlines()
    assert first.startswith("· word")
    assert second.startswith("  word")
