"""An explanation in terminals of several widths."""

import io

import pytest
from rich.console import Console
from tests.unit.doctor.real_messages import MESSAGES
from tests.unit.report.samples import drawn

from vramfit.doctor.explain import explain
from vramfit.records.finding import Finding
from vramfit.report.findings import render_explanation, render_findings, summarize

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
    assert summarize(FINDINGS[:1]) == "No problems found."


def test_a_long_finding_hangs_below_its_text() -> None:
    finding = Finding(check="a", severity="info", what="word " * 30)
    first, second, *_ = drawn(render_findings([finding]), 60).splitlines()
    assert first.startswith("· word")
    assert second.startswith("  word")


OLD = next(r.text for r in MESSAGES if "GenerativeGraph" in r.where)


def shown(width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(render_explanation(explain([OLD])))
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_has_whole_words_and_no_bars(width: int) -> None:
    text = " ".join(shown(width).split())
    assert "▆" not in text
    for words in ("tensors of this process", "PyTorch's allocator: reserved,", "in no tensor"):
        assert words in text
    assert all(len(line) <= width for line in shown(width).splitlines())


def test_a_wide_terminal_has_bars_in_proportion() -> None:
    lines = shown(120).splitlines()
    assert any("tensors of this process" in line and line.count("▆") > 20 for line in lines)
    assert any("nobody" in line and line.count("▆") == 1 for line in lines)
