"""On a real GPU: the stepper's prediction, its budget, and recovery from memory that really runs out."""

import copy
import gc
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from vramfit.errors import BudgetExceeded
from vramfit.estimator.predict import estimate
from vramfit.loader.load import load
from vramfit.models.resolve import resolve
from vramfit.runtime.device import enforce
from vramfit.runtime.stepper import Stepper
from vramfit.techniques.application import use_expandable_segments

pytestmark = pytest.mark.gpu

MODEL, SEQ = "bert-base-uncased", 128
MIB = 2**20
JOB: dict[str, Any] = {"seq": SEQ, "optimizer": "adamw-fused", "loop": "stepper", "gpu": "h200"}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model, _ = load(MODEL, random_weights=True, device="cuda")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def make_batch(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.ones(size, SEQ, dtype=torch.long)
    mask[:, 1] = 0
    return {
        "input_ids": torch.randint(1000, 30000, (size, SEQ), generator=draw),
        "attention_mask": mask,
        "labels": torch.randint(0, 2, (size,), generator=draw),
    }


def make_stepper(model: torch.nn.Module, micro_batch: int, **keywords: Any) -> Stepper:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return Stepper(model, optimizer, micro_batch=micro_batch, seq=SEQ, **keywords)


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "amp-fp16"])
@pytest.mark.parametrize("batch", [8, 22])
def test_the_measured_peak_is_the_predicted_one(precision: Any, batch: int) -> None:
    """In a process of its own, where no other test has held memory or changed how it is held."""
    config = resolve(MODEL).config
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    predicted = estimate(
        config, batch=batch, micro_batch=8, precision=precision, max_grad_norm=1.0, allocator="expandable", **JOB
    )
    with get_context("spawn").Pool(1) as fresh:
        measured = fresh.apply(_peak, (precision, batch))
    assert measured <= predicted.peak_allocated_bytes <= 1.001 * measured


def _peak(precision: Any, batch: int) -> int:
    use_expandable_segments(torch.device("cuda"))
    stepper = make_stepper(small_model(), 8, precision=precision, max_grad_norm=1.0)
    for seed in range(4):
        stepper.step(make_batch(batch, seed))
    return torch.cuda.max_memory_allocated()


def test_what_was_not_announced_is_refused_and_recovered_from() -> None:
    free, capped = (make_stepper(model, 32) for model in _twins())
    batches = [make_batch(32, seed) for seed in range(4)]
    expected = [free.step(batch) for batch in batches]
    peak = torch.cuda.max_memory_allocated()
    del free
    gc.collect()
    torch.cuda.empty_cache()
    enforce(int(0.7 * (peak - torch.cuda.memory_allocated())) + torch.cuda.memory_allocated(), torch.device("cuda", 0))
    made = [capped.step(batch) for batch in batches]
    assert capped.num_recoveries >= 1
    assert capped.micro_batch < 32
    assert made == pytest.approx(expected, rel=1e-4)
    assert capped.num_steps == 4


def _twins() -> tuple[torch.nn.Module, torch.nn.Module]:
    model = small_model()
    return model, copy.deepcopy(model)


def test_a_budget_below_what_is_held_is_said() -> None:
    kept = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(BudgetExceeded):
        enforce("128MiB", torch.device("cuda", 0))
    assert kept.numel()


def test_a_rehearsal_finds_what_does_not_fit_before_the_first_step() -> None:
    model = small_model()
    budget = torch.cuda.memory_allocated() * 4 + 700 * MIB
    stepper = make_stepper(model, 64, memory=budget)
    stepper.rehearse(make_batch(128))
    assert stepper.micro_batch < 64
    assert stepper.num_steps == 0
    before = stepper.num_recoveries
    stepper.step(make_batch(128))
    assert stepper.num_recoveries == before
