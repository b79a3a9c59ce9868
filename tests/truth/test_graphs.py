"""Recorded passes and fused layers on an H200: what was allocated and reserved, beside what is predicted."""

import json
from pathlib import Path
from typing import Any

import pytest

from vramfit.estimator.predict import estimate

MEASURED = [
    json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("graphs_h200.json", "fused_h200.json")
]
CASES = [(truth, case) for truth in MEASURED for case in truth["cases"]]
MAX_ERROR, MAX_COMPILED = 0.002, 0.015


@pytest.mark.parametrize(
    ("truth", "case"), CASES, ids=[f"{c['workload']['model']}-{n}" for n, (_, c) in enumerate(CASES)]
)
def test_predicted_peaks_are_the_measured_ones_and_never_below(truth: dict[str, Any], case: dict[str, Any]) -> None:
    workload = dict(case["workload"])
    release = ".".join(truth["torch"].split(".")[:2])
    made = estimate(workload.pop("model"), **workload, gpu="h200", torch_version=release)
    allowed = MAX_COMPILED if workload.get("compile") else MAX_ERROR
    for predicted, seen in (
        (made.peak_allocated_bytes, case["max_allocated_bytes"]),
        (made.peak_reserved_bytes, case["max_reserved_bytes"]),
    ):
        assert seen <= predicted <= (1 + allowed) * seen
    assert made.peak_reserved_bytes <= made.safe_reserved_bytes <= (1 + allowed + 0.01) * case["max_reserved_bytes"]
