"""Pages show the committed results of runs on a GPU."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import distilled_memory
import embeddings
import forked
import type_cases

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def lines(name: str, *keys: str) -> list[dict[str, object]]:
    found = forked.read_lines(RESULTS / f"{name}.jsonl", *keys)
    assert found
    return found


@pytest.mark.parametrize(
    ("page", "mark", "script", "table"),
    [
        (
            "decoders",
            "types",
            "type_cases",
            lambda: type_cases.table([lines(f"type_cases_{seed}_h200_2026-11-19", "name") for seed in (33, 34, 35)]),
        ),
        (
            "embeddings",
            "speed",
            "embeddings",
            lambda: embeddings.table(
                [
                    line
                    for end in ("", "_beside_others")
                    for line in lines(f"embeddings_h200_2026-11-19{end}", *embeddings.KEYS)
                ]
            ),
        ),
        (
            "distillation",
            "memory",
            "distilled_memory",
            lambda: distilled_memory.table(lines("distilled_memory_h200_2026-11-19", "name")),
        ),
    ],
)
def test_a_page_has_the_table_of_its_results(page: str, mark: str, script: str, table: object) -> None:
    assert callable(table)
    begin, end = f"<!-- {mark}: made by benchmarks/{script}.py -->", f"<!-- end of {mark} -->"
    assert f"{begin}\n\n{table()}\n\n{end}" in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def test_memory_of_a_distilled_run_is_never_above_its_prediction() -> None:
    for line in lines("distilled_memory_h200_2026-11-19", "name"):
        taken = line["measured_allocated_bytes"]
        again = distilled_memory.predicted_again(line)
        assert taken <= line["predicted_allocated_bytes"]
        if again is not None:  # today's code
            assert taken <= again <= (1 + distilled_memory.MOST_ERROR) * taken
