"""With the real Trainer: gradients of a fitted step are the whole batch's, where the plain Trainer's are not."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.unit.integrations.small_trainers import difference, gradients_of, make_trainer, whole_gradient
from tests.unit.runtime.small_models import FAMILIES, HEADS, LENGTH, make_batch, make_model

import vramfit
from vramfit.integrations.trainer import check, fit_trainer

BATCH, SIZE = 16, 21
"""A whole step of 16 samples, and a last one of 5."""
SIMPLEST = "sequence-classification"
ALMOST_ALL = {(family, task) for family in FAMILIES for task in HEADS if task != "question-answering"}
IGNORES_COUNT = ALMOST_ALL - {("modernbert", "masked-lm")}
"""Heads that take `num_items_in_batch` and do nothing with it."""


@cache
def plan_for(task: str, num_passes: int) -> vramfit.Plan:
    """A plan that splits as asked; memory is not the question here, so one of BERT's serves for all families."""
    if (task, num_passes) != (SIMPLEST, 2):
        plan = plan_for(SIMPLEST, 2)
        workload = replace(plan.workload, task=task, micro_batch=BATCH // num_passes, accumulate=num_passes)
        return replace(plan, workload=workload)
    settings = {"precision": "fp32", "optimizer": "adamw-fused", "micro_batch": BATCH // num_passes}
    return vramfit.plan(make_model("bert", task), task=task, batch=BATCH, seq=LENGTH, memory="1GiB", **settings)


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_the_whole_batch_however_it_is_split(family: str, task: str, tmp_path: Path) -> None:
    batch = make_batch(task, SIZE)
    windows = [{n: v[:BATCH] for n, v in batch.items()}, {n: v[BATCH:] for n, v in batch.items()}]
    right = [whole_gradient(family, task, window) for window in windows]
    for num_passes in (2, 4, 8):
        settings = {"per_device_train_batch_size": BATCH // num_passes, "gradient_accumulation_steps": num_passes}
        settings |= {"learning_rate": 0.0, "max_grad_norm": 0.0, "size": SIZE}
        plain = make_trainer(tmp_path, family, task, **settings)
        complaints = [f for f in check(plain) if f.check == "trainer.loss_scale"]
        before = gradients_of(plain)
        trainer = make_trainer(tmp_path, family, task, **settings)
        fit_trainer(trainer, plan=plan_for(task, num_passes), show=False)
        after = gradients_of(trainer)
        assert len(before) == len(after) == 2
        for gradient, whole in zip(after, right, strict=True):
            assert difference(gradient, whole) <= 1e-5
        if (family, task) in IGNORES_COUNT:
            assert difference(before[0], right[0]) > 0.8 * (num_passes - 1)
            assert complaints[0].severity == "error"
            assert f"{num_passes} times too long" in complaints[0].what
        else:
            assert complaints[0].severity in ("ok", "warning")
            assert difference(before[0], right[0]) < 1


@pytest.mark.parametrize("num_passes", [2, 4, 8])
def test_classification_was_as_many_times_too_long_as_there_are_passes(num_passes: int, tmp_path: Path) -> None:
    task = "sequence-classification"
    batch = make_batch(task, BATCH)
    settings = {"per_device_train_batch_size": BATCH // num_passes, "gradient_accumulation_steps": num_passes}
    plain = make_trainer(tmp_path, task=task, size=BATCH, learning_rate=0.0, max_grad_norm=0.0, **settings)
    whole = whole_gradient("bert", task, batch)
    assert float(gradients_of(plain)[0].norm() / whole.norm()) == pytest.approx(num_passes, rel=1e-4)
