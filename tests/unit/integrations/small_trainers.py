"""Real Trainers over small models, and the gradients of their steps."""

from pathlib import Path
from typing import Any

import torch
from tests.unit.runtime.small_models import flat_gradient, make_batch, make_model
from transformers import Trainer, TrainerCallback, TrainingArguments

QUIET = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "save_strategy": "no"}


def rows_of(task: str, size: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    batch = make_batch(task, size, seed)
    return [{name: value[i] for name, value in batch.items()} for i in range(size)]


def make_trainer(
    output: Path, family: str = "bert", task: str = "sequence-classification", *, size: int = 20, **given: Any
) -> Trainer:
    """A Trainer over `size` rows in order, with arguments and keywords of Trainer mixed."""
    kind = given.pop("kind", Trainer)
    names = ("data_collator", "compute_metrics", "callbacks", "optimizers", "model_init", "compute_loss_func")
    own = {name: given.pop(name) for name in names if name in given}
    if "model_init" not in own:
        own["model"] = given.pop("model", None) or make_model(family, task)
    rows = given.pop("rows", None) or rows_of(task, size)
    settings = {**QUIET, "train_sampling_strategy": "sequential", "num_train_epochs": 1, **given}
    args = TrainingArguments(output_dir=str(output), **settings)
    return kind(args=args, train_dataset=rows, eval_dataset=rows, **own)


class Gradients(TrainerCallback):
    """Keeps the gradient of every step, as the optimizer gets it, unclipped."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.steps.append(flat_gradient(model))


def gradients_of(trainer: Trainer) -> list[torch.Tensor]:
    """Train, and give the gradient of each step."""
    seen = Gradients()
    trainer.add_callback(seen)
    trainer.train()
    return seen.steps


def whole_gradient(family: str, task: str, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the model's own loss over a whole batch."""
    model: Any = make_model(family, task)
    model(**batch).loss.backward()
    return flat_gradient(model)


def difference(gradient: torch.Tensor, right: torch.Tensor) -> float:
    """Relative to the length of the right one."""
    return float((gradient - right).norm() / right.norm())
