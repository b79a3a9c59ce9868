"""The tables of docs/smaller.md are those that its script makes of the committed results."""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import forked
import smaller

PAGE = Path(__file__).parents[3] / "docs" / "smaller.md"


def test_the_page_shows_the_committed_results(tmp_path: Path) -> None:
    lines = forked.read_lines(smaller.RESULTS, "part", "case")
    assert {line["part"] for line in lines} == set(smaller.RUNS)
    shutil.copy(PAGE, tmp_path)
    smaller.write_page(tmp_path / "smaller.md", lines)
    assert (tmp_path / "smaller.md").read_text() == PAGE.read_text()


def test_the_bounds_that_the_page_speaks_of_are_held() -> None:
    lines = forked.read_lines(smaller.RESULTS, "part", "case")
    for line in (line for line in lines if line["part"] == "prune"):
        assert line["share"] <= float(smaller.KEEP)
        assert line["accuracy"]["recovered"] >= 0.96 * line["accuracy"]["whole"]
    for line in (line for line in lines if line["part"] == "trim"):
        assert line["max_difference"] <= 1e-5
        assert line["after"]["file_bytes"] < line["before"]["file_bytes"]
