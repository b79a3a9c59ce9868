"""One way to prepare a model: applied in one order, undone in reverse, by one public call."""

from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import make_batch, make_model

import vramfit
from vramfit import Workload, WorkloadError
from vramfit.techniques import application, casting, fusing, packing

TASK = "sequence-classification"
BASE: dict[str, Any] = {"model": "m", "batch": 12, "micro_batch": 4, "seq": 16, "loop": "stepper"}


def looks(model: torch.nn.Module) -> list[Any]:
    """What techniques that can be undone change in a model."""
    modules = [(m.training, getattr(m, "gradient_checkpointing", None), len(m._forward_hooks)) for m in model.modules()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    attention = model.config._attn_implementation  # type: ignore[union-attr]
    return [modules, hooks, attention, [(n, p.requires_grad) for n, p in model.named_parameters()]]


@pytest.mark.parametrize(
    "changes",
    [
        {"freeze": "embeddings", "checkpointing": 1},
        {"checkpointing": "full", "offload": "activations"},
        {"precision": "amp-bf16", "casts": "together"},
        {"precision": "amp-bf16", "attention": "packed", "fused": True},
        {"dropout": False},
    ],
)
def test_what_was_applied_is_undone(changes: dict[str, Any]) -> None:
    model = make_model("bert", TASK)
    before, weights = looks(model), {n: p.clone() for n, p in model.named_parameters()}
    undo = application.apply(model, Workload(**BASE, **changes))
    assert looks(model) != before or fusing.is_applied(model) or casting.is_applied(model)
    undo()
    assert looks(model) == before
    assert not any(technique.is_applied(model) for technique in (packing, fusing, casting))
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention": "packed"}, {"offload": "weights", "checkpointing": "full", "optimizer": "adamw-fused"}],
)
def test_a_prepared_model_learns_what_a_plain_one_learns(changes: dict[str, Any]) -> None:
    plain, model, batch = make_model("bert", TASK), make_model("bert", TASK), make_batch(TASK)
    expected = vramfit.Stepper(plain, torch.optim.AdamW(plain.parameters(), lr=1e-5), micro_batch=4, seq=16).step(batch)
    job = Workload(**BASE, **changes)
    assert vramfit.prepare(model, job, device="cpu") is model
    stepper = vramfit.Stepper(model, vramfit.make_optimizer(model, job), job)
    assert stepper.step(batch) == pytest.approx(expected, rel=1e-5)
    assert stepper.micro_batch == 4


def test_a_keyword_that_no_step_has_is_refused_with_the_nearest() -> None:
    model = make_model("bert", TASK)
    with pytest.raises(WorkloadError, match=r"unknown keyword 'micro_bach'.*micro_batch"):
        vramfit.Stepper(model, torch.optim.AdamW(model.parameters()), micro_bach=4)
