"""The page on distillation has the table of the committed results, and students keep what is claimed."""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import distillation
import forked

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "distillation_cpu_2026-11-18.jsonl"
MPNET = ROOT / "benchmarks" / "results" / "distillation_mpnet_cpu_2026-11-19.jsonl"
SEARCH = ROOT / "benchmarks" / "results" / "distillation_search_cpu_2026-11-18.jsonl"


def test_the_page_has_the_table_of_the_results() -> None:
    page = (ROOT / "docs" / "distillation.md").read_text(encoding="utf-8")
    for what, files in (("distillation", (RESULTS, MPNET)), ("search", (SEARCH,))):
        lines = [line for file in files for line in forked.read_lines(file, "data", "side", "seed")]
        begin, end = f"<!-- {what}: made by benchmarks/distillation.py -->", f"<!-- end of {what} -->"
        assert f"{begin}\n\n{distillation.table(lines)}\n\n{end}" in page


def test_a_student_of_half_the_layers_finds_what_is_claimed() -> None:
    lines = forked.read_lines(SEARCH, "data", "side", "seed")
    (teacher,) = distillation.scores(lines, "xquad", "teacher")
    found = distillation.scores(lines, "xquad", "logits")
    assert len(found) == len(distillation.SEEDS)
    assert statistics.fmean(found) >= distillation.LEAST_SHARE * teacher


def test_students_of_half_the_layers_keep_what_is_claimed() -> None:
    lines = forked.read_lines(RESULTS, "data", "side", "seed")
    for name in {line["data"] for line in lines}:
        kept = distillation.scores(lines, name, "logits")
        assert len(kept) == len(distillation.SEEDS)
        (teacher,) = distillation.scores(lines, name, "teacher")
        assert statistics.fmean(kept) >= distillation.LEAST_SHARE * teacher
