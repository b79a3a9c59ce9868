"""The step is one: what changes a run's step changes the prediction of it."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import make_batch, make_model

from vramfit import Stepper
from vramfit import estimate as predict
from vramfit.estimator import traced
from vramfit.step.step import Step

JOB: dict[str, Any] = {"batch": 8, "accumulate": 2, "seq": 32, "gpu": "a100-40gb", "loop": "stepper"}
EXTRA_BYTES = 64 * 2**20


def estimate(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> int:
    """Bytes that are requested at the peak, by a trace of its own."""
    monkeypatch.setattr(traced, "_kept", OrderedDict())
    return predict("bert-tiny", **JOB, **changes).peak_requested_bytes


def holding_more(part: Callable[..., Any], held: list[torch.Tensor]) -> Callable[..., Any]:
    """A part of the step that asks for memory beside, and keeps it."""

    def more(self: Step, *arguments: Any, **keywords: Any) -> Any:
        held.append(torch.empty(EXTRA_BYTES, dtype=torch.uint8, device=self.parameters[0].device))
        return part(self, *arguments, **keywords)

    return more


def run_once() -> None:
    model = make_model("bert", "sequence-classification")
    Stepper(model, torch.optim.AdamW(model.parameters()), micro_batch=4).step(make_batch("sequence-classification"))


@pytest.mark.parametrize("part", ["passes", "finish", "commit"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "amp-fp16"},
        {"num_gpus": 2, "parallel": "fsdp"},
        {"attention": "packed", "precision": "amp-bf16", "optimizer": "adamw-fused", "graphs": True},
    ],
)
def test_a_change_of_the_runs_step_changes_the_prediction(
    part: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = estimate(monkeypatch, **changes)
    held: list[torch.Tensor] = []
    monkeypatch.setattr(Step, part, holding_more(getattr(Step, part), held))
    run_once()
    assert [tensor.device.type for tensor in held] == ["cpu"], "the Stepper runs this code"
    after = estimate(monkeypatch, **changes)
    assert {tensor.device.type for tensor in held[1:]} == {"meta"}, "a prediction runs it too"
    assert after - before >= EXTRA_BYTES


def test_a_step_on_the_host_is_the_same_code_too(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    commit = Step.commit
    monkeypatch.setattr(Step, "commit", lambda self, room: (called.append(str(self.host)), commit(self, room))[1])
    estimate(monkeypatch, precision="amp-fp16", offload="optimizer", max_grad_norm=1.0)
    assert len(called) == 2
    assert all("HostStep" in name for name in called)
