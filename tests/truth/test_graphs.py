"""Recorded passes on an H200: what was allocated and reserved, beside what is predicted."""

import json
from pathlib import Path
from typing import Any

import pytest

from vramfit.estimator.predict import estimate

TRUTH = json.loads(Path(__file__).with_name("graphs_h200.json").read_text(encoding="utf-8"))
MAX_ERROR, MAX_COMPILED = 0.002, 0.015


@pytest.mark.parametrize(
    "case", TRUTH["cases"], ids=lambda case: f"{case['workload']['model']}-{case['workload']['batch']}"
)
def test_predicted_peaks_are_the_measured_ones_and_never_below(case: dict[str, Any]) -> None:
    workload = dict(case["workload"])
    release = ".".join(TRUTH["torch"].split(".")[:2])
    made = estimate(workload.pop("model"), **workload, gpu="h200", torch_version=release)
    allowed = MAX_COMPILED if workload.get("compile") else MAX_ERROR
    for predicted, seen in (
        (made.peak_allocated_bytes, case["max_allocated_bytes"]),
        (made.safe_reserved_bytes, case["max_reserved_bytes"]),
    ):
        assert seen <= predicted <= (1 + allowed) * seen
