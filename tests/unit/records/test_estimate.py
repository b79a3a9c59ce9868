import json
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from vramfit.errors import VramfitError
from vramfit.records.codec import RecordError, from_json, to_data, to_json
from vramfit.records.estimate import Advice, Estimate, MaxBatch, PeakMoment, PhaseEstimate, TensorGroup, TimelinePoint
from vramfit.workload import Workload

PHASE = PhaseEstimate(peak_requested_bytes=90, peak_allocated_bytes=100, peak_reserved_bytes=200)


def record(**changes: Any) -> Estimate:
    fields: dict[str, Any] = {
        "workload": Workload(model="m", freeze=("a.*", "b.*"), memory="1GiB", checkpointing=2),
        "gpu": "t4",
        "compute_capability": (7, 5),
        "torch_version": "2.11.0",
        "basis": "derived",
        "peak_requested_bytes": 90,
        "peak_allocated_bytes": 100,
        "peak_reserved_bytes": 200,
        "peak_process_bytes": 250,
        "context_bytes": 50,
        "safe_reserved_bytes": 210,
        "capacity_bytes": 1000,
        "total_memory_bytes": 1050,
        "fits": True,
        "fits_cold": False,
        "num_retries": 1,
        "phases": {"load": PHASE, "first_step": PHASE, "steady_step": PHASE},
        "peak": PeakMoment(phase="first_step", part="backward", module="m.0", operator="mm"),
        "breakdown": {"weights": 60, "gradients": 40},
        "modules": {"m.0": 70, "": 30},
        "groups": (
            TensorGroup(category="weights", operator="parameter", module="m.*", num_blocks=2, allocated_bytes=60),
        ),
        "timeline": (TimelinePoint(part="forward", allocated_bytes=100),),
        "notes": ("derived: …",),
        "snapshot": lambda: {"segments": [], "device_traces": [[]]},
    }
    return Estimate(**(fields | changes))


def test_json_brings_back_everything_but_the_stream() -> None:
    e = record()
    read = from_json(Estimate, to_json(e))
    assert read == e
    assert read.snapshot is None
    assert "snapshot" not in to_data(e)
    assert read.workload.freeze == ("a.*", "b.*")


def test_what_is_not_known_is_null_and_comes_back_as_none() -> None:
    e = record(gpu=None, capacity_bytes=None, total_memory_bytes=None, fits=None, fits_cold=None)
    assert json.loads(to_json(e))["fits"] is None
    assert from_json(Estimate, to_json(e)) == e


@pytest.mark.parametrize("field", ["peak_allocated_bytes", "phases", "workload", "fits"])
def test_a_field_that_is_missing_is_named(field: str) -> None:
    data = json.loads(to_json(record()))
    del data[field]
    with pytest.raises(RecordError, match=f"field '{field}' is missing"):
        from_json(Estimate, json.dumps(data))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"basis": "guessed"}, "basis"),
        ({"peak_allocated_bytes": 1.5}, "peak_allocated_bytes"),
        ({"fits": "yes"}, "fits"),
        ({"snapshot": {}}, "unknown field 'snapshot'"),
        ({"groups": [{"category": "air"}]}, r"groups\[0\]"),
    ],
)
def test_a_field_of_a_wrong_kind_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        from_json(Estimate, json.dumps(json.loads(to_json(record())) | change))


def test_the_stream_plays_no_part_in_what_is_equal_or_shown() -> None:
    assert record() == record(snapshot=None)
    assert "snapshot" not in repr(record())


def test_what_the_capacity_leaves_is_counted_from_the_safe_bound() -> None:
    assert record().free_bytes == 790
    assert record(capacity_bytes=200).free_bytes == -10
    assert record(capacity_bytes=None).free_bytes is None


def test_an_estimate_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        record().fits = False  # type: ignore[misc]


def test_the_snapshot_is_written_as_a_pickle(tmp_path: Path) -> None:
    record().save_snapshot(str(tmp_path / "step.pickle"))
    assert pickle.loads((tmp_path / "step.pickle").read_bytes()) == {"segments": [], "device_traces": [[]]}


def test_an_estimate_without_a_stream_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(VramfitError, match="no stream to save") as caught:
        replace(record(), snapshot=None).save_snapshot(tmp_path / "step.pickle")
    assert caught.value.hint == "estimate it again"
    assert list(tmp_path.iterdir()) == []


def test_the_largest_batch_and_advice_are_saved_too() -> None:
    best = MaxBatch(batch=8, cold_batch=7, estimate=record(), limited_by="9 samples …", not_fitting=(5, 6))
    advice = Advice(change="attention sdpa", kind="free", saved_bytes=1, peak_allocated_bytes=2, fits=None)
    assert from_json(MaxBatch, to_json(best)) == best
    assert from_json(Advice, to_json(advice)) == advice
