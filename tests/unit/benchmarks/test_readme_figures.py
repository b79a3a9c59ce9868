"""Figures of the README and of the page on accuracy are those of the committed results."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import accuracy
import readme_figures


def test_the_readme_has_the_figures_of_the_results() -> None:
    text = readme_figures.README.read_text(encoding="utf-8")
    assert readme_figures.fill(text) == text


def test_every_block_that_is_made_is_in_the_readme_once() -> None:
    assert sorted(readme_figures.names(readme_figures.README.read_text(encoding="utf-8"))) == sorted(
        readme_figures.BLOCKS
    )


def test_a_figure_that_was_changed_by_hand_is_put_right() -> None:
    text = "before\n<!-- figures: trained -->\n100.0 %\n<!-- end -->\nafter\n"
    filled = readme_figures.fill(text)
    assert "100.0 %" not in filled
    assert filled.startswith("before\n")
    assert filled.endswith("after\n")


def test_a_block_that_nobody_makes_is_an_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        readme_figures.fill("<!-- figures: nothing -->\n<!-- end -->\n")


def test_the_page_on_accuracy_is_that_of_the_results() -> None:
    assert accuracy.PAGE.read_text(encoding="utf-8") == accuracy.page()


def test_the_page_on_accuracy_speaks_of_at_least_300_runs() -> None:
    assert accuracy.num_cases() >= 300
