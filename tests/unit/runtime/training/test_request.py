"""Requests: every problem at once, and what makes a resumed run another one."""

from typing import Any

import pytest

from vramfit.errors import WorkloadError
from vramfit.runtime.training.request import TrainRequest


def request(**changes: Any) -> TrainRequest:
    return TrainRequest(**({"model": "m", "data": "d.csv", "output": "out"} | changes))


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(WorkloadError) as caught:
        request(schedule="linar", epochs=0, keep=0, lr=-1, device="tpu", patience=2)
    text = str(caught.value)
    for part in (
        "schedule 'linar'",
        "nearest: linear",
        "epochs 0",
        "keep 0",
        "lr -1",
        "device 'tpu'",
        "patience needs",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fail_at": (3,)}, "fail_at is for device emulated"),
        ({"device": "emulated"}, "needs memory"),
        ({"warmup": float("inf")}, "warmup inf"),
        ({"lr": float("nan")}, "lr nan"),
        ({"lr": 1e9}, "lr 1000000000.0 is not a number above 0 and below 1,000"),
        ({"weight_decay": -1.0}, "weight_decay -1.0 is not a number from 0 and below 1,000"),
        ({"memory": "much"}, "memory 'much' is not a size"),
        ({"task": "question-answering", "label_smoothing": 0.1}, "label_smoothing is for"),
        ({"label_smoothing": 1.0}, "below 1"),
        ({"graphs": True, "label_smoothing": 0.1}, "graphs and label_smoothing"),
        ({"quantize": "int8"}, "cannot learn"),
        ({"lora": 4, "freeze": "encoder"}, "drop freeze"),
        ({"batch": 4, "micro_batch": 8}, "micro_batch 8 is larger than batch 4"),
        ({"eval_every": 5}, "eval_every needs eval_data"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        request(**changes)


def test_only_what_makes_another_training_differs() -> None:
    saved = request(lr=1e-4, keep=5, memory="1GiB").as_data()
    assert request(lr=1e-4, keep=1, resume=True, output="elsewhere").differences(saved) == []
    assert request(lr=1e-4).differences({**saved, "graphs": False}) == []  # as runs had it before plans chose it
    assert request(lr=2e-4, seed=3).differences(saved) == ["lr is 0.0002, and was 0.0001", "seed is 3, and was 0"]


@pytest.mark.parametrize(
    "changes", [{"fused": True}, {"fused": True, "precision": "amp-bf16"}, {"fused": False}], ids=str
)
def test_fused_layers_may_be_asked_for_before_a_plan_is_made(changes: dict[str, Any]) -> None:
    assert request(**changes).settings()["fused"] is changes["fused"]
