"""On a real GPU: training from host memory follows plain training, inside what was predicted."""

from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import make_batch, make_model

import vramfit
from vramfit.models.resolve import resolve
from vramfit.runtime.measurement import prepare
from vramfit.runtime.stepper import Stepper
from vramfit.settings import checkpointing
from vramfit.techniques import offloading, optimizers
from vramfit.techniques.offloading import layer_inputs

pytestmark = pytest.mark.gpu

TASK = "sequence-classification"
NUM_STEPS = 20


def train(offload: Any, precision: Any) -> tuple[torch.Tensor, list[float]]:
    torch.manual_seed(0)
    model = make_model("bert", TASK, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, vocab_size=20000)
    checkpointing.apply(model, "full")
    if offload == "weights":
        offloading.apply(model, 0, "cuda", trains=True)
    else:
        model.cuda()
    if offload == "activations":
        layer_inputs.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    stepper = Stepper(model, optimizer, micro_batch=4, max_grad_norm=1.0, precision=precision, offload=offload)
    losses = [stepper.step(make_batch(TASK, seed=seed)) for seed in range(NUM_STEPS)]
    return torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()]), losses


@pytest.mark.parametrize("offload", ["optimizer", "weights", "activations"])
@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "amp-fp16"])
def test_training_is_the_same_but_for_the_order_of_sums(offload: str, precision: str) -> None:
    """A copy that came too early or too late would show at once."""
    plain, losses = train(None, precision)
    ours, our_losses = train(offload, precision)
    assert our_losses == pytest.approx(losses, abs=2e-3 if precision == "fp32" else 2e-2)
    assert float((ours - plain).norm() / plain.norm()) < (1e-3 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("offload", ["optimizer", "weights"])
@pytest.mark.parametrize("precision", ["tf32", "amp-bf16", "bf16"])
def test_the_peak_is_what_was_predicted(offload: Any, precision: Any) -> None:
    predicted = vramfit.estimate(
        "bert-base-uncased",
        batch=16,
        micro_batch=4,
        seq=256,
        precision=precision,
        optimizer="adamw-fused",
        checkpointing="full",
        offload=offload,
        loop="stepper",
        max_grad_norm=1.0,
        allocator="expandable",
        memory="4GiB",
        gpu="h200",
    )
    w = predicted.workload
    model = prepare(resolve(w.model, task=w.task), w)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if offload == "weights":
        offloading.apply(model, 0, "cuda", trains=True)
    else:
        model.cuda()
    optimizer = optimizers.make(w.optimizer, model.parameters())
    stepper = Stepper(model, optimizer, micro_batch=4, seq=256, max_grad_norm=1.0, precision=precision, offload=offload)
    ids = torch.randint(1000, 30000, (16, 256))
    mask = torch.ones_like(ids)
    mask[:, 1] = 0
    for _ in range(3):
        stepper.step({"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(16, dtype=torch.long)})
    taken = torch.cuda.max_memory_allocated() - before
    print(f"{offload} {precision}: {taken:,} B allocated, {predicted.peak_allocated_bytes:,} predicted")
    assert taken <= predicted.peak_allocated_bytes
    workspaces = predicted.breakdown["workspaces"]  # another test may have made them
    assert taken >= 0.99 * (predicted.peak_allocated_bytes - workspaces)
