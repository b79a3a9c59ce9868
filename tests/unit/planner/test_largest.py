"""The largest batch: what fits, and what leaves the margin that a plan of the same settings keeps."""

from typing import Any

import pytest

from vramfit.estimator import search
from vramfit.planner.choose import max_batch
from vramfit.planner.plan import plan

JOB: dict[str, Any] = {"seq": 128, "memory": "300MiB"}


@pytest.mark.parametrize(("gpu", "torch_version"), [("t4", "2.11"), ("h200", "2.11")])
@pytest.mark.parametrize("allocator", ["default", "expandable"])
def test_the_margin_is_that_of_a_plan_with_the_same_settings(gpu: str, torch_version: str, allocator: str) -> None:
    job = {**JOB, "gpu": gpu, "torch_version": torch_version, "allocator": allocator, "precision": "fp32"}
    found = max_batch("bert-tiny", **job)
    made = plan("bert-tiny", batch=found.margin_batch, optimizer="adamw-fused", **job)
    assert (found.margin_bytes, found.margin_reason) == (made.margin_bytes, made.margin_reason)
    capacity = found.estimate.capacity_bytes
    assert capacity is not None
    inside = search.max_batch("bert-tiny", **{**job, "memory": capacity - made.margin_bytes})
    assert found.margin_batch == inside.batch < found.batch == search.max_batch("bert-tiny", **job).batch


def test_a_precision_that_was_only_the_default_is_compared_with_the_usual_one() -> None:
    for gpu, mode, precision in (("t4", "train", "amp-fp16"), ("a10g", "train", "amp-bf16"), ("t4", "infer", "fp16")):
        found = max_batch("bert-tiny", gpu=gpu, mode=mode, **JOB)
        assert found.usual_precision == precision
        given = max_batch("bert-tiny", gpu=gpu, mode=mode, precision=precision, **JOB)
        assert found.usual_batch == given.margin_batch
        assert given.usual_precision is given.usual_batch is None
    assert max_batch("bert-tiny", gpu="t4", precision="fp32", **JOB).usual_precision is None


def test_where_nothing_fits_there_is_nothing_to_leave_a_margin() -> None:
    found = max_batch("bert-tiny", seq=128, memory="4MiB")
    assert (found.batch, found.margin_batch, found.usual_batch) == (0, None, None)
    barely = max_batch("bert-tiny", seq=512, memory="132MiB")
    assert barely.margin_batch is not None
    assert 0 <= barely.margin_batch <= barely.batch
