"""Real Trainers over small models whose plans pack, and the rows they make."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.integrations.small_trainers import make_trainer
from tests.unit.integrations.test_gradients import plan_for
from tests.unit.runtime.small_models import FAMILIES, HEADS
from transformers import Trainer

import vramfit
from vramfit.integrations.trainer import fit_trainer
from vramfit.step.plain import Batch
from vramfit.techniques import packing

PACKED = [family for family in FAMILIES if family != "deberta-v2"]
TASKS = [task for task in HEADS if task != "question-answering"]
STILL = {"learning_rate": 0.0, "max_grad_norm": 0.0}
SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
MEMORY = "256MiB"


def packed_plan(task: str = "sequence-classification", num_passes: int = 4) -> vramfit.Plan:
    """In fp32, which only the CPU packs in: gradients can be compared to the last digits."""
    plan = plan_for(task, num_passes)
    return replace(plan, workload=replace(plan.workload, attention="packed"))


def packed_trainer(output: Path, family: str = "bert", task: str = "sequence-classification", **given: Any) -> Trainer:
    num_passes = given.pop("num_passes", 4)
    trainer = make_trainer(output, family, task, **{**SPLIT, **given})
    fit_trainer(trainer, plan=packed_plan(task, num_passes), show=False)
    return trainer


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows that are made, by how many sequences they have."""
    rows: list[int] = []
    pack = packing.pack

    def noting(batch: Batch, model: Any) -> dict[str, Any]:
        rows.append(len(batch["input_ids"]))
        return pack(batch, model)

    with monkeypatch.context() as patch:
        patch.setattr(packing, "pack", noting)
        yield rows
