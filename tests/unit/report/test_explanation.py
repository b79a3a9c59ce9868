"""An explanation in terminals of several widths."""

import io

import pytest
from rich.console import Console
from tests.unit.doctor.real_messages import MESSAGES

from vramfit.doctor.explain import explain
from vramfit.report.explanation import render_explanation

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
