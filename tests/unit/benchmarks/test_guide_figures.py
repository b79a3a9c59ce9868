"""Figures of the guides are those of the committed results."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import guide_figures
import readme_figures


@pytest.mark.parametrize("page", guide_figures.GUIDES, ids=lambda page: page.name)
def test_a_guide_has_the_figures_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert sorted(readme_figures.names(text)) == sorted(guide_figures.GUIDES[page])
    assert readme_figures.fill(text, guide_figures.GUIDES[page]) == text


def test_a_figure_that_was_changed_by_hand_is_put_right() -> None:
    text = "<!-- figures: ranks -->\n\n100 % exact\n\n<!-- end -->\n"
    assert "100 %" not in readme_figures.fill(text, {"ranks": guide_figures.ranks})
