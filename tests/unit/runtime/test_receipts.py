"""Receipts of jobs that ran, held against the catalogue and against what is predicted today."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.records.receipts import KEYWORDS, measured_as, peaks, receipt
from tests.unit.runtime.training.small_runs import run, write_model

from vramfit.errors import VramfitError
from vramfit.estimator.predict import estimate
from vramfit.records.codec import to_json
from vramfit.records.estimate import Estimate
from vramfit.records.plan import Plan
from vramfit.records.receipt import problems_of, write_receipt
from vramfit.runtime.receipts import (
    card_problems,
    public_name,
    receipt_of_measurement,
    receipt_of_run,
    repeat_prediction,
)


@pytest.fixture(scope="module")
def predicted() -> Estimate:
    return estimate("bert-tiny", gpu="t4", **KEYWORDS)


def test_a_measurement_as_predicted_makes_a_receipt_that_agrees(predicted: Estimate) -> None:
    made = receipt_of_measurement(predicted, measured_as(predicted))
    assert made.agrees
    assert made.settings["batch"] == 4
    assert (made.model, made.predicted_gpu, made.context_bytes) == ("bert-tiny", "t4", 200)
    assert made.measured.step_time_s == 0.25
    assert list(card_problems(made)) == []
    assert not receipt_of_measurement(predicted, measured_as(predicted, more=1.02)).agrees


def test_a_run_that_ran_out_before_the_model_was_there_has_no_receipt(predicted: Estimate) -> None:
    with pytest.raises(VramfitError, match="nothing was measured"):
        receipt_of_measurement(predicted, measured_as(predicted, phases={}, out_of_memory="CUDA out of memory"))


def test_a_prediction_is_repeated_from_the_receipt_alone(predicted: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    made = receipt_of_measurement(predicted, measured_as(predicted))
    assert repeat_prediction(made) == ("repeated to the byte", True)
    monkeypatch.setattr("vramfit.runtime.receipts.version", lambda name: made.transformers_version)
    forged = replace(made, predicted=replace(made.predicted, allocated_bytes=made.predicted.allocated_bytes + 512))
    words, is_possible = repeat_prediction(forged)
    assert not is_possible
    assert "though it names the same vramfit and transformers" in words
    words, is_possible = repeat_prediction(replace(forged, vramfit_version="0.0.1"))
    assert is_possible
    assert words.startswith("marked: this vramfit predicts")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"is_emulated": True}, "proves nothing about a card"),
        ({"gpu": "Tesla T44"}, "the catalogue has no Tesla T44"),
        ({"total_memory_bytes": 80 * 2**30}, "the catalogue has no Tesla T4 with"),
        ({"compute_capability": (9, 0)}, "t4 is sm_75, and the receipt says"),
        ({"predicted_gpu": "h200"}, "it was predicted for h200, and ran on t4"),
        ({"predicted_gpu": "h2000"}, "which is not in the catalogue"),
    ],
)
def test_a_receipt_that_cannot_be_of_its_card_is_refused(changes: dict[str, Any], why: str) -> None:
    assert any(why in problem for problem in card_problems(receipt(**changes)))


def test_a_model_of_ones_own_is_a_digest_of_its_shape_and_not_a_path(tmp_path: Path) -> None:
    one, same = write_model(tmp_path / "anna"), write_model(tmp_path / "tom")
    other = write_model(tmp_path / "wide", intermediate_size=64)
    names = [public_name(str(folder), "sequence-classification") for folder in (one, same, other)]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("sha256:")
    assert public_name("google-bert/bert-base-uncased", "sequence-classification") == "bert-base-uncased"


def test_a_run_on_the_emulated_gpu_has_a_receipt_that_says_so_and_names_nobody(tmp_path: Path) -> None:
    record = run(tmp_path, device="emulated", memory=200 * 2**20, max_steps=2)
    made = receipt_of_run(record, Plan.load(tmp_path / "out" / "plan.json"))
    assert made.is_emulated
    assert (made.gpu, made.total_memory_bytes) == ("emulated", 200 * 2**20)
    assert str(tmp_path) not in to_json(made)
    assert [p for p in problems_of(made) if "digest" not in p] == []
    write_receipt(made, tmp_path / "r.json")
    assert repeat_prediction(made)[0].startswith("not repeated: only a digest")


def test_a_run_on_the_cpu_has_none() -> None:
    with pytest.raises(VramfitError, match="on the CPU"):
        receipt_of_run(NO_ALLOCATOR, None)  # type: ignore[arg-type]


class NO_ALLOCATOR:  # noqa: N801
    measured_reserved_bytes = measured_allocated_bytes = None


def test_errors_are_shares_of_what_was_measured() -> None:
    assert receipt(predicted=peaks(90, 120)).error("allocated") == pytest.approx(-0.1)
