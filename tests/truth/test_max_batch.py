"""The largest batch against 24 searches on a real H200 under a cap: never one that ran out of memory."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.truth.cases import load, model_of, workload_of

from vramfit.estimator.search import max_batch
from vramfit.units import GIB

CASES = load("max_batch_h200")
SHOWN = Path(__file__).parents[2] / "benchmarks" / "results" / "recorded_truth_h200.json"
"""What the README and the page on accuracy are made from."""


def predict(case: dict[str, Any]) -> int:
    w = workload_of(case | {"batch": 1, "mask": case.get("mask", "none")})
    return max_batch(
        model_of(case),
        task=w.task,
        mode=w.mode,
        seq=w.seq,
        precision=w.precision,
        attention=w.attention,
        mask=w.mask,
        checkpointing=w.checkpointing,
        optimizer="adamw-fused" if case.get("fused") else "adamw",
        gpu="h200",
        memory=int(case["budget_gib"] * GIB),
        torch_version="2.11.0",
    ).batch


@pytest.mark.parametrize("index", range(len(CASES)))
def test_the_largest_batch_never_runs_out_and_is_at_most_one_percent_below(index: int) -> None:
    case, result = CASES[index]["case"], CASES[index]["result"]
    found, true = predict(case), result["max_batch"]
    assert found <= true, "a batch that really ran out of memory"
    assert found not in result.get("out_of_memory", ())
    assert true - found <= max(1, true // 100)
    assert json.loads(SHOWN.read_text())["largest"][index] == [found, true]
