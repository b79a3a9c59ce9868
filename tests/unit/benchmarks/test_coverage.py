"""The page on types of models is made from the committed results, and says of each type what was found."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import coverage

RESULTS = coverage.ROOT / "benchmarks" / "results" / "coverage_cpu_2026-11-18.jsonl"


def test_the_page_is_that_of_the_results() -> None:
    lines = coverage.read_lines(RESULTS, "type")
    assert coverage.PAGE.read_text(encoding="utf-8") == coverage.make_page(lines)


def test_every_type_is_predicted_or_has_its_reason() -> None:
    lines = {line["type"]: line for line in coverage.read_lines(RESULTS, "type")}
    assert sorted(lines) == coverage.all_types()
    assert sum(map(coverage.is_estimated, lines.values())) >= 118
    assert all(coverage.reason(line) for line in lines.values() if not coverage.is_estimated(line))


def test_a_default_is_cut_to_two_layers() -> None:
    for name in ("bert", "bart", "qwen3_next", "t5gemma"):
        config = coverage.make_config(name)
        stack = getattr(config, "decoder", None) or config
        assert getattr(stack, "num_hidden_layers", None) == coverage.NUM_LAYERS
