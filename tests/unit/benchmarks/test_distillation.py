"""The page on distillation has the table of the committed results, and students keep what is claimed."""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import distillation
import forked

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "distillation_cpu_2026-11-18.jsonl"


def test_the_page_has_the_table_of_the_results() -> None:
    lines = forked.read_lines(RESULTS, "data", "side", "seed")
    page = (ROOT / "docs" / "distillation.md").read_text(encoding="utf-8")
    assert f"{distillation.BEGIN}\n\n{distillation.table(lines)}\n\n{distillation.END}" in page


def test_students_of_half_the_layers_keep_what_is_claimed() -> None:
    lines = forked.read_lines(RESULTS, "data", "side", "seed")
    for name in {line["data"] for line in lines}:
        scores = {
            side: [line["accuracy"] for line in lines if (line["data"], line["side"]) == (name, side)]
            for side in ("teacher", "logits")
        }
        assert len(scores["logits"]) == len(distillation.SEEDS)
        assert statistics.fmean(scores["logits"]) >= distillation.LEAST_SHARE * scores["teacher"][0]
