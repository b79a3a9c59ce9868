"""One GPU of several against recorded runs of DDP and FSDP2 on an H200, where a fake group stood for the others."""

import json
from typing import Any

import pytest
from tests.truth.cases import HERE, load_stream

from vramfit.estimator.predict import estimate
from vramfit.estimator.resolve import resolve_workload

MAX_ERROR = 0.01
MEASURED = ("weights", "load"), ("step0",), ("step1", "step2")
PREDICTED = ("load", "first_step", "steady_step")
CASES = [
    case
    for case in json.loads((HERE / "ranks_h200.json").read_text())
    if case["job"]["model"] == "distilbert-base-uncased"
    or (case["parallel"], case["num_gpus"], case["job"]["model"]) == ("fsdp", 8, "roberta-base")
    or (case["job"]["optimizer"] == "adamw" and case["num_gpus"] in (2, 8))
]
"""Of the 36 that were run, twice each: the smallest model in every world, where two runs differed most, and steps that
need temporaries."""


def keywords_of(case: dict[str, Any]) -> dict[str, Any]:
    """The job of one rank, as the effective batch of the world."""
    job = dict(case["job"])
    batch = job["micro_batch"] * job.pop("accumulate", 1) * case["num_gpus"]
    world = {"num_gpus": case["num_gpus"], "parallel": case["parallel"], "loop": "stepper"}
    return {**job, "batch": batch, **world, "gpu": "h200", "torch_version": case["torch"]}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['parallel']}-{c['num_gpus']}-{c['job']['model']}")
def test_no_rank_took_more_than_predicted_in_any_phase_nor_much_less(case: dict[str, Any]) -> None:
    found = estimate(**keywords_of(case))
    for run in case["runs"]:
        _, allocated, reserved = (max(column) for column in zip(*run.values(), strict=True))
        assert allocated <= found.peak_allocated_bytes <= allocated * (1 + MAX_ERROR)
        assert reserved <= found.safe_reserved_bytes
        assert found.peak_requested_bytes == max(requested for requested, _, _ in run.values())
        for name, moments in zip(PREDICTED, MEASURED, strict=True):
            measured = max(run[moment][1] for moment in moments)
            assert measured <= found.phases[name].peak_allocated_bytes <= measured * (1 + MAX_ERROR), name


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_asks_for_what_was_recorded_in_the_same_order_on_the_same_streams(parallel: str) -> None:
    run = load_stream(f"ranks_{parallel}")
    keywords = keywords_of(run)
    traced, _ = resolve_workload(keywords.pop("model"), keywords)
    stream = traced.stream(run["job"]["micro_batch"])
    requests: list[tuple[int, int]] = []
    predicted: list[tuple[str, int, int]] = []
    for event in stream.events:
        if event > 0:
            requests.append((event, stream.request_streams.get(len(requests), 0)))
            predicted.append(("A", *requests[-1]))
        else:
            predicted.append(("F", *requests[-event]))
    assert predicted == [tuple(event) for event in run["events"]]


def test_pages_say_what_was_measured() -> None:
    root = HERE.parent.parent
    (path,) = (root / "benchmarks" / "results").glob("ranks_memory_h200_*.json")
    found = json.loads(path.read_text(encoding="utf-8"))["summary"]["all"]
    words = f"In {found['num_cases']} cases"
    architecture = " ".join((root / "ARCHITECTURE.md").read_text(encoding="utf-8").split())
    page = " ".join((root / "docs" / "several-gpus.md").read_text(encoding="utf-8").split())
    assert words in architecture
    assert f"0 to {100 * found['worst_error']:.2f} % above the measured ones, never below" in architecture
    assert found["num_below"] == 0
    assert f"{found['num_cases']} cases with" in page
    assert f"predicted exactly in {found['num_exact']} of them" in page
