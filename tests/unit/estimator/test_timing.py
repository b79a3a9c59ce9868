"""The step time of an estimate: filled where rates are known, and by a profile where there is one."""

from pathlib import Path
from typing import Any

import pytest
from tests.unit.timing.samples import calibration

from vramfit.estimator.predict import estimate, reference_work
from vramfit.records.codec import from_json, to_json
from vramfit.records.estimate import Estimate
from vramfit.records.measurement import REFERENCE
from vramfit.timing.model import save_profile


@pytest.fixture(autouse=True)
def no_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def predict(**keywords: Any) -> Estimate:
    return estimate("bert-mini", **({"batch": 64, "seq": 128, "gpu": "a10g"} | keywords))


def seconds(**keywords: Any) -> float:
    found = predict(**keywords).step_time_s
    assert found is not None
    return found


def test_a_step_has_a_time_and_what_it_is_spent_on() -> None:
    e = predict()
    assert e.step_time_s is not None
    assert e.time_basis == "catalogue"
    assert set(e.time_breakdown) == {"matrix products", "attention", "elementwise", "optimizer", "host"}
    assert max(e.time_breakdown.values()) <= e.step_time_s <= sum(e.time_breakdown.values())


def test_without_a_gpu_or_its_rates_there_is_no_time() -> None:
    assert predict(gpu=None, memory="8GiB").step_time_s is None
    e = predict(gpu="rtx-4090-laptop")
    assert (e.step_time_s, e.time_basis, e.time_breakdown) == (None, None, {})


def test_more_work_takes_longer() -> None:
    base = seconds(gpu="t4")
    assert seconds(gpu="t4", batch=256) > base
    assert seconds(gpu="t4", checkpointing="full") > base
    assert seconds(gpu="t4", mode="infer") < base / 2
    assert seconds(gpu="h200", batch=256) < seconds(gpu="t4", batch=256)


def test_half_precision_and_tf32_are_faster_where_products_limit() -> None:
    large = {"batch": 1024, "gpu": "a100-80gb"}
    assert seconds(**large, precision="bf16") < seconds(**large, precision="tf32") < seconds(**large)


def test_a_step_counts_all_of_its_micro_batches() -> None:
    one, eight = seconds(batch=64), seconds(batch=512, accumulate=8)
    assert 5 * one < eight < 8 * one  # the optimizer steps once


def test_a_profile_changes_the_time_and_is_named() -> None:
    plain = predict()
    save_profile(calibration(host_factor=4.0))
    e = predict()
    assert e.time_basis == "calibrated"
    assert any("calibration of NVIDIA A10G" in note for note in e.notes)
    assert e.step_time_s != plain.step_time_s
    assert e.peak_reserved_bytes == plain.peak_reserved_bytes


def test_the_time_survives_being_saved() -> None:
    e = predict()
    again = from_json(Estimate, to_json(e))
    assert (again.step_time_s, again.time_basis) == (e.step_time_s, e.time_basis)
    assert again.time_breakdown == e.time_breakdown


def test_the_reference_of_a_calibration_is_limited_by_the_host() -> None:
    e = estimate(REFERENCE.model, batch=1, seq=REFERENCE.seq, mask=REFERENCE.mask, optimizer="sgd", gpu="t4")
    assert e.step_time_s == pytest.approx(e.time_breakdown["host"], rel=0.1)
    assert reference_work("t4").segments
    assert reference_work(None).segments
