"""The benchmark of random cases: the draw, the run that goes on where it stopped, the comparison."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vramfit.estimator.predict import estimate
from vramfit.models.catalogue import all_entries
from vramfit.records.codec import to_data
from vramfit.records.measurement import Measurement, PhaseMeasurement
from vramfit.runtime.measurement import MeasurementError
from vramfit.units import GIB
from vramfit.workload import Workload

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import case_space
import random_cases

H200 = {"gpu": "NVIDIA H200", "total_memory_bytes": 150_109_945_856, "compute_capability": (9, 0)}


def measured(workload: Workload, *, off_by: int = 0) -> Measurement:
    """What a GPU would have answered, were the prediction right but for so many bytes."""
    keywords = {k: v for k, v in to_data(workload).items() if k != "model"} | {"gpu": "h200", "torch_version": "2.11"}
    predicted = estimate(workload.model, **keywords)
    phases = {
        name: PhaseMeasurement(
            peak_requested_bytes=phase.peak_requested_bytes,
            peak_allocated_bytes=phase.peak_allocated_bytes + off_by,
            peak_reserved_bytes=phase.peak_reserved_bytes,
        )
        for name, phase in predicted.phases.items()
    }
    return Measurement(
        workload=workload,
        **H200,  # type: ignore[arg-type]
        torch_version="2.11.0+cu130",
        transformers_version="5.17.0",
        driver_version=None,
        phases=phases | {"inputs": phases["load"]},
        steps=(phases["first_step"], phases["steady_step"]),
        step_times_s=(0.1, 0.1),
        num_retries=0,
        num_ooms=0,
        reserved_bytes=0,
        process_bytes=None,
        out_of_memory=None,
    )


def run(measure: Any, *, max_seconds: float = 100.0) -> Any:
    return random_cases.Run(measure=measure, seed=7, workers=2, max_seconds=max_seconds)


CASES = [Workload(model="bert-tiny", batch=n, seq=16) for n in (1, 2, 3)]


def test_the_same_seed_draws_the_same_cases() -> None:
    assert case_space.draw_cases(1, 80) == case_space.draw_cases(1, 80)
    assert case_space.draw_cases(1, 10) == case_space.draw_cases(1, 80)[:10]
    assert case_space.draw_cases(1, 10) != case_space.draw_cases(2, 10)


def test_the_draw_covers_the_whole_space() -> None:
    cases = case_space.draw_cases(2026, 64)
    assert len(cases) == len({json.dumps(to_data(case), sort_keys=True) for case in cases}) == 64
    assert len({case.model for case in cases}) >= 30
    families = {entry.family for entry in all_entries() if entry.name in {case.model for case in cases}}
    assert families >= {"bert", "roberta", "deberta-v2", "albert", "modernbert", "mpnet", "electra", "distilbert"}
    for field, values in {
        "task": {*case_space.HEADS, "pretraining"},
        "mode": {"train", "forward", "infer"},
        "precision": {"fp32", "tf32", "amp-fp16", "amp-bf16", "bf16"},
        "mask": {"none", "ones", "padded"},
        "optimizer": set(case_space.OPTIMIZERS),
        "allocator": {"default", "expandable"},
        "accumulate": {1, 2, 3, 4},
        "dropout": {True, False},
        "max_grad_norm": {None, 1.0},
    }.items():
        assert {getattr(case, field) for case in cases} >= values, field
    assert {77, 381} <= {case.seq for case in cases}
    assert sum(case.trains for case in cases) > 40


def test_cases_keep_within_their_bound_and_their_model() -> None:
    entries = {entry.name: entry for entry in all_entries()}
    for case in case_space.draw_cases(3, 200, bound_bytes=8 * GIB):
        entry = entries[case.model]
        assert case_space.rough_bytes(case, entry) <= 8 * GIB
        assert case.seq <= entry.max_positions
        assert (case.micro_batch or 0) <= 48


def test_a_later_call_runs_only_what_is_missing(tmp_path: Path) -> None:
    out, asked = tmp_path / "cases.jsonl", []
    answers = {case.batch: measured(case) for case in CASES}

    def measure(workload: Workload, timeout_s: float) -> Measurement:
        asked.append(workload.batch)
        if workload.batch == 2 and asked.count(2) == 1:
            raise MeasurementError("the driver hiccuped")
        return answers[workload.batch]

    assert random_cases.run_cases(CASES, out, run(measure)) == 1
    assert sorted(asked) == [1, 2, 3]
    with out.open("a") as file:
        file.write('{"workload": {"mod')  # a call that was cut off
    assert random_cases.run_cases(CASES, out, run(measure)) == 0
    assert sorted(asked) == [1, 2, 2, 3]
    assert random_cases.run_cases(CASES, out, run(measure)) == 0
    assert sorted(asked) == [1, 2, 2, 3]


def test_no_case_begins_when_the_time_is_over(tmp_path: Path) -> None:
    def measure(workload: Workload, timeout_s: float) -> Measurement:
        raise AssertionError

    assert random_cases.run_cases(CASES, tmp_path / "cases.jsonl", run(measure, max_seconds=1.0)) == 1


def lines(*measurements: Measurement) -> list[dict[str, Any]]:
    return [
        {"seed": 7, "workload": to_data(m.workload), "measurement": to_data(m), "error": None} for m in measurements
    ]


def test_the_comparison_counts_exact_cases_and_those_too_low(tmp_path: Path, capsys: Any) -> None:
    right, high, low = measured(CASES[0]), measured(CASES[1], off_by=-512), measured(CASES[2], off_by=3 * 2**20)
    failed = {"seed": 7, "workload": to_data(CASES[0].with_batch(9)), "measurement": None, "error": "no such head"}
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines(right, high, low), failed]))

    assert random_cases.main(["--compare", str(file), "--results", str(tmp_path), "--quiet"]) == 0

    (saved,) = tmp_path.glob("random_cases_h200_*.json")
    kept = json.loads(saved.read_text())
    summary = kept["summary"]
    assert (summary["num_cases"], summary["num_compared"], summary["num_not_run"]) == (4, 3, 1)
    assert summary["exact_share_allocated_both_steps"] == pytest.approx(1 / 3, abs=1e-3)
    assert summary["exact_share_reserved_both_steps"] == 1.0
    assert (summary["num_under_allocated"], summary["num_under_reserved"]) == (1, 0)
    assert kept["seeds"] == [7]
    assert kept["torch_version"] == "2.11.0+cu130"
    shown = capsys.readouterr().out
    assert "-3,145,728" in shown
    assert "no such head" in shown


def test_a_case_that_cannot_be_predicted_is_counted_not_fatal() -> None:
    from case_comparison import compare_lines

    (line,) = lines(measured(CASES[0]))
    line["measurement"]["torch_version"] = "one"
    _, summary = compare_lines([line])
    assert summary["num_not_predicted"] == 1


def test_a_bound_that_no_model_keeps_is_refused() -> None:
    with pytest.raises(ValueError, match="no model trains in 1,000 bytes"):
        case_space.draw_cases(1, 1, bound_bytes=1000)
