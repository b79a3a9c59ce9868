"""Figures of the README and of the page on accuracy are those of the committed results."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import accuracy
import readme_figures


@pytest.mark.parametrize("page", readme_figures.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_figures_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert readme_figures.fill(text, readme_figures.PAGES[page]) == text


@pytest.mark.parametrize("page", readme_figures.PAGES, ids=lambda page: page.name)
def test_every_block_is_on_its_page_once(page: Path) -> None:
    assert sorted(readme_figures.names(page.read_text(encoding="utf-8"))) == sorted(readme_figures.PAGES[page])


def test_a_figure_that_was_changed_by_hand_is_corrected() -> None:
    text = "before\n<!-- figures: trained -->\n100.0 %\n<!-- end -->\nafter\n"
    filled = readme_figures.fill(text, readme_figures.MEASURED)
    assert "100.0 %" not in filled
    assert filled.startswith("before\n")
    assert filled.endswith("after\n")


def test_a_block_without_a_function_is_an_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        readme_figures.fill("<!-- figures: nothing -->\n<!-- end -->\n", readme_figures.MEASURED)


def test_the_readme_is_short() -> None:
    assert len(readme_figures.README.read_text(encoding="utf-8").splitlines()) <= 200


def test_the_page_on_accuracy_is_that_of_the_results() -> None:
    assert accuracy.PAGE.read_text(encoding="utf-8") == accuracy.page()


def test_the_page_on_accuracy_speaks_of_at_least_300_runs() -> None:
    assert accuracy.num_cases() >= 300
