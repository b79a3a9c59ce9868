"""The stepper beside recovery: precision, scheduler, losses of one's own, budgets, plans, resumption, interrupts."""

import copy
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tests.unit.runtime.small_models import LENGTH, flat_gradient, flat_weights, make_batch, make_model

from vramfit.errors import WorkloadError
from vramfit.runtime.interruption import uninterrupted
from vramfit.runtime.step_settings import largest_like
from vramfit.runtime.stepper import Stepper
from vramfit.step.commit import goes_in_portions, take_step
from vramfit.step.splitting import split
from vramfit.workload import Workload

TASK = "sequence-classification"


def adamw(model: torch.nn.Module, **keywords: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **keywords)


def squares(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output.logits.float().pow(2).sum()


def num_samples(batch: dict[str, torch.Tensor]) -> int:
    return int(batch["input_ids"].shape[0])


def test_a_loss_of_ones_own_gives_the_same_step_however_it_is_split() -> None:
    model = make_model("bert", TASK)
    batch = {k: v for k, v in make_batch(TASK).items() if k != "labels"}
    made = []
    for micro_batch in (12, 5, 1):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
        Stepper(twin, optimizer, micro_batch=micro_batch, loss_fn=squares, count_fn=num_samples).step(batch)
        made.append(flat_weights(twin))
    assert (made[0] - made[1]).norm() / made[0].norm() < 1e-5
    assert (made[0] - made[2]).norm() / made[0].norm() < 1e-5


def test_gradients_are_left_to_a_loop_that_steps_by_itself() -> None:
    model = make_model("bert", TASK)
    batch = make_batch(TASK)
    loss = model(**batch).loss
    loss.backward()
    right = flat_gradient(model)
    optimizer, scaler = adamw(model, fused=True), torch.amp.GradScaler("cpu", init_scale=8.0)
    stepper = Stepper(model, optimizer, micro_batch=5, max_grad_norm=1e-3)
    stepper.scaler = scaler
    before = flat_weights(model)
    found = stepper.gradients(batch)
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert torch.equal(flat_weights(model), before)
    assert (flat_gradient(model) - 8 * right).norm() / right.norm() < 1e-4  # scaled, and not clipped
    scaler.unscale_(optimizer)  # which raises where it has been done already
    assert (flat_gradient(model) - right).norm() / right.norm() < 1e-5
    assert stepper.num_steps == 0
    assert all(p in optimizer.state for p in model.parameters() if p.grad is not None)


def test_a_mean_in_place_of_a_sum_is_refused() -> None:
    model = make_model("bert", TASK)
    stepper = Stepper(
        model, adamw(model), micro_batch=4, loss_fn=lambda o, b: squares(o, b) / num_samples(b), count_fn=num_samples
    )
    before = flat_weights(model)
    with pytest.raises(WorkloadError, match="not their sum"):
        stepper.step(make_batch(TASK))
    assert torch.equal(before, flat_weights(model))


def test_a_loss_that_compares_samples_is_refused_and_its_name_warned_of() -> None:
    def contrastive_loss(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        vectors = torch.nn.functional.normalize(output.logits)
        scores = 20 * vectors @ vectors.T
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum")

    model = make_model("bert", TASK)
    with pytest.warns(UserWarning, match="contrastive_loss"):
        stepper = Stepper(model, adamw(model), micro_batch=4, loss_fn=contrastive_loss, count_fn=num_samples)
    with pytest.raises(WorkloadError, match="not their sum"):
        stepper.step(make_batch(TASK))


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"micro_batch": 0}, "whole number"),
        ({}, "no plan gives one"),
        ({"micro_batch": 4, "precision": "fp16"}, "precision"),
        ({"micro_batch": 4, "loss_fn": squares}, "go together"),
    ],
)
def test_wrong_settings_are_named(keywords: dict[str, Any], says: str) -> None:
    model = make_model("bert", TASK)
    with pytest.raises(WorkloadError, match=says):
        Stepper(model, adamw(model), **keywords)


def test_batchnorm_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    with pytest.raises(WorkloadError, match=r"1 is a BatchNorm1d"):
        Stepper(model, adamw(model), micro_batch=2)


def test_an_optimizer_that_asks_for_the_loss_is_refused() -> None:
    model = make_model("bert", TASK)
    with pytest.raises(WorkloadError, match="LBFGS"):
        Stepper(model, torch.optim.LBFGS(model.parameters()), micro_batch=2)


def test_an_optimizer_that_accelerate_wrapped_is_refused() -> None:
    model = make_model("bert", TASK)
    wrapped = Accelerator(cpu=True).prepare(adamw(model))
    with pytest.raises(WorkloadError, match="AcceleratedOptimizer is a wrapper: give AdamW itself"):
        Stepper(model, wrapped, micro_batch=2)


def test_the_scheduler_follows_only_steps_that_were_taken() -> None:
    model = make_model("bert", TASK)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    stepper = Stepper(model, optimizer, micro_batch=12, precision="amp-fp16", scheduler=scheduler)
    stepper.step(make_batch(TASK))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)
    before = flat_weights(model)
    with torch.no_grad():
        model.classifier.weight.fill_(float("inf"))  # type: ignore[union-attr, operator]
    poisoned = flat_weights(model)
    stepper.step(make_batch(TASK))
    assert stepper.num_skipped == 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)
    assert torch.equal(poisoned, flat_weights(model))
    assert stepper.loss_scale == pytest.approx(65536 / 2)
    assert before.isfinite().all()


def test_a_resumed_stepper_goes_on_to_the_bit() -> None:
    model = make_model("bert", TASK, hidden_dropout_prob=0.1)
    batches = [make_batch(TASK, seed=seed) for seed in range(4)]
    torch.manual_seed(5)
    stepper = Stepper(model, adamw(model), micro_batch=4, precision="amp-fp16")
    for batch in batches[:2]:
        stepper.step(batch)
    twin = copy.deepcopy(model)
    optimizer = adamw(twin)
    optimizer.load_state_dict(copy.deepcopy(stepper.optimizer.state_dict()))
    resumed = Stepper(twin, optimizer, micro_batch=4, precision="amp-fp16")
    resumed.load_state_dict(copy.deepcopy(stepper.state_dict()))
    random = torch.get_rng_state()
    for batch in batches[2:]:
        stepper.step(batch)
    torch.set_rng_state(random)
    for batch in batches[2:]:
        resumed.step(batch)
    assert torch.equal(flat_weights(model), flat_weights(twin))
    assert stepper.state_dict() == resumed.state_dict()


def test_a_stepper_goes_on_with_other_settings_to_the_same_weights() -> None:
    model = make_model("bert", TASK)
    twin = copy.deepcopy(model)
    first = Workload(model="m", batch=12, micro_batch=12, loop="stepper", optimizer="adamw-fused")
    steppers = [Stepper(m, adamw(m, fused=True), first) for m in (model, twin)]
    changes = [replace(first, micro_batch=4, accumulate=None, checkpointing="full"), first]
    for seed, changed in enumerate([None, *changes]):
        if changed is not None:
            steppers[1].change(changed)
            assert steppers[1].micro_batch == changed.micro_batch
            assert twin.is_gradient_checkpointing == (changed.checkpointing == "full")  # type: ignore[comparison-overlap]
        for stepper in steppers:
            stepper.step(make_batch(TASK, seed=seed))
    assert (flat_weights(model) - flat_weights(twin)).abs().max() < 1e-5
    assert [stepper.num_steps for stepper in steppers] == [3, 3]


def test_what_cannot_change_in_a_run_is_refused_and_nothing_is_changed() -> None:
    model = make_model("bert", TASK)
    first = Workload(model="m", batch=12, micro_batch=12, loop="stepper", optimizer="adamw-fused")
    stepper = Stepper(model, adamw(model), first)
    other = replace(first, micro_batch=4, accumulate=None, precision="amp-bf16")
    with pytest.raises(WorkloadError, match="precision amp-bf16 cannot take the place of fp32 in a run"):
        stepper.change(other)
    with pytest.raises(WorkloadError, match="seq 64 cannot take the place of 128 in a run"):
        stepper.change(replace(first, seq=64))  # micro_batch counts samples of full length
    with pytest.raises(WorkloadError, match="a plan is a Plan or a Workload, not str"):
        stepper.change("plan.json")  # type: ignore[arg-type]
    assert stepper.micro_batch == 12


def test_a_stepper_without_a_plan_goes_on_with_one_whatever_its_kernel_for_padded_batches() -> None:
    model = make_model("bert", TASK)
    stepper = Stepper(model, adamw(model), micro_batch=12)
    first = Workload(model="m", batch=12, micro_batch=4, loop="stepper", optimizer="adamw-fused", attention="sdpa")
    stepper.change(first)
    assert stepper.micro_batch == 4
    with pytest.raises(WorkloadError, match="attention packed cannot take the place of None"):
        stepper.change(replace(first, attention="packed"))


def test_a_rehearsal_changes_nothing_that_is_learned() -> None:
    model = make_model("bert", TASK, hidden_dropout_prob=0.1)
    batches = [make_batch(TASK, seed=seed) for seed in range(2)]
    trained = []
    for rehearses in (False, True):
        twin = copy.deepcopy(model)
        torch.manual_seed(9)
        stepper = Stepper(twin, adamw(twin), micro_batch=4)
        if rehearses:
            stepper.rehearse(batches[0])
        for batch in batches:
            stepper.step(batch)
        trained.append(flat_weights(twin))
    assert torch.equal(*trained)


@pytest.mark.parametrize("task", [TASK, "token-classification", "question-answering"])
def test_the_dearest_batch_is_full_and_masked(task: str) -> None:
    made = largest_like(make_batch(task), 20, 24)
    assert made["input_ids"].shape == (20, 24)
    assert made["attention_mask"][:, -1].all()
    assert not made["attention_mask"].all()
    assert {b["input_ids"].shape for b in split(made, 5 * 24)} == {(5, 24)}


def test_samples_are_split_by_tokens_and_cut_to_their_longest() -> None:
    batch = make_batch(TASK)
    parts = split(batch, 2 * LENGTH)
    assert sum(len(p["labels"]) for p in parts) == 12
    assert all(p["input_ids"].numel() <= 2 * LENGTH for p in parts)
    assert max(len(p["labels"]) for p in parts) > 2  # short ones go together
    widths = [(int(p["attention_mask"].sum(1).max()), p["input_ids"].shape[1]) for p in parts]
    assert all(longest <= width < longest + 8 and (width % 8 == 0 or width == LENGTH) for longest, width in widths)


def test_ctrl_c_waits_for_the_end_of_a_step() -> None:
    seen = []

    def step() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            seen.append("still here")

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            step()
    finally:
        signal.signal(signal.SIGINT, usual)
    assert seen == ["still here"]


def test_a_polite_kill_waits_too_where_that_is_asked_for() -> None:
    seen: list[str] = []
    usual = signal.signal(signal.SIGTERM, lambda number, frame: seen.append("killed"))
    try:
        with uninterrupted(signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append("still here")
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert seen == ["still here", "killed"]


class CountsItsSteps(torch.optim.Optimizer):
    """An optimizer whose step is not one of single parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"count": 0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["seen"] = p.grad.clone()
                    p.data.add_(p.grad, alpha=-0.1 / group["count"])


def test_an_optimizer_that_counts_is_stepped_at_once() -> None:
    model = make_model("bert", TASK)
    optimizer = CountsItsSteps(model.parameters())
    assert not goes_in_portions(optimizer)
    Stepper(model, optimizer, micro_batch=4).step(make_batch(TASK))
    assert optimizer.param_groups[0]["count"] == 1


def test_a_step_in_large_portions_equals_one_in_small_ones() -> None:
    made = []
    for room in (0, 2**40):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(3000, 1000)) for _ in range(5)]
        optimizer = torch.optim.AdamW(weights, lr=0.1)
        for w in weights:
            w.grad = torch.randn_like(w)
        take_step(optimizer, room=lambda room=room: room)  # type: ignore[misc]
        made.append(torch.cat([w.detach().flatten() for w in weights]))
    assert torch.equal(*made)
