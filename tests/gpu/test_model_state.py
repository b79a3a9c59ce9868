"""State of a model on a real GPU: kept in host memory, put back to the bit, also where passes are replayed."""

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.unit.runtime.small_models import make_batch, make_model
from tests.unit.runtime.stateful import KINDS, MovingAverage, Small, state_of

from vramfit.runtime.model_state import ModelState
from vramfit.runtime.stepper import Stepper
from vramfit.techniques import packing

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:every forward pass changes:UserWarning")]
TASK = "sequence-classification"
CALLS: list[None] = []
"""Of layers; global, since what hooks hold is put back with the model's state."""


class Noise(torch.nn.Module):
    """From a generator of the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cuda").manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.generator, device="cuda")


def train(fail_at: set[int], num_steps: int = 6) -> tuple[Any, int, int]:
    """Losses and state, how often layers were called, the peak; calls numbered in `fail_at` run out of memory."""
    model = Small(*KINDS)
    model.layer.append(Noise())
    model = model.cuda().train()
    CALLS.clear()

    def run_out(*_: Any) -> None:
        CALLS.append(None)
        if len(CALLS) in fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    for layer in model.layer:
        layer.register_forward_hook(run_out)
    stepper = Stepper(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        micro_batch=6,
        loss_fn=lambda logits, batch: F.cross_entropy(logits, batch["labels"], reduction="sum"),
        count_fn=lambda batch: len(batch["labels"]),
    )
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses = [float(stepper.advance(make_batch(TASK, seed=seed))) for seed in range(num_steps)]
    assert stepper.num_recoveries == len(fail_at)
    return (losses, state_of(model)), len(CALLS), torch.cuda.max_memory_allocated() - before


def test_windows_done_again_leave_no_trace() -> None:
    expected, num_calls, _ = train(set())
    assert train(set())[0] == expected
    for first in range(1, 32):  # the first window, and one of those in which it is known what moves
        fail_at = {first, num_calls // 2 + first}
        assert train(fail_at)[0] == expected, first


def test_what_is_kept_takes_no_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, peak = train(set())
    for name in ("keep", "learn"):
        monkeypatch.setattr(ModelState, name, lambda self: None)
    assert train(set())[2] == peak


def test_what_replayed_passes_change_is_put_back() -> None:
    model: Any = make_model("bert", TASK, hidden_size=64, num_hidden_layers=2, intermediate_size=64)
    average = MovingAverage()
    average.mean = torch.zeros(64)
    model.bert.pooler.dense = torch.nn.Sequential(model.bert.pooler.dense, average)
    model = model.cuda().train()
    packing.apply(model, TASK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    stepper = Stepper(model, optimizer, micro_batch=4, seq=16, precision="amp-bf16", graphs=True)
    batch = make_batch(TASK)
    for _ in range(3):
        stepper.step(batch)
    graphs_ = stepper._graph_use.passes
    assert graphs_ is not None
    assert graphs_.num_captured
    before, counted = average.mean.clone(), average.mean._version
    stepper._state.keep()
    stepper._window(batch, finishes=True)
    assert average.mean._version == counted  # a replay does not count
    assert not torch.equal(average.mean, before)
    stepper._state.put_back()
    assert torch.equal(average.mean, before)
