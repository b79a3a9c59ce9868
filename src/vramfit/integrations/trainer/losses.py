"""The loss of a Trainer: whose it is, whether any split of a batch gives the same, and the sum it stands for.

Losses of sentence-transformers may compare the samples of a batch; they are known by name, or tried.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

from vramfit.errors import WorkloadError
from vramfit.models.tasks import task_of_class
from vramfit.runtime.model_state import untouched
from vramfit.step.own_loss import still
from vramfit.step.plain import Batch, each_tensor
from vramfit.step.random_state import RandomState
from vramfit.tasks import find_task, task_names
from vramfit.tasks.base import IGNORED
from vramfit.tasks.parts.losses import head_loss, loss_of, model_inputs

Origin = Literal["head", "smoother", "function", "own"]
MAX_DIFFERENCE = 1e-3
"""Of a head's loss against the mean that vramfit takes; half precision stays below."""

PACKAGE = "sentence_transformers"
NUM_TRIED = 4
"""Samples that a loss is tried on, and on half of them at a time."""
CACHED = "CachedMultipleNegatives", "CachedGIST"
NEGATIVES = "MultipleNegatives", "GIST"
ACROSS_SAMPLES = (
    *CACHED,
    *NEGATIVES,
    "CoSENT",
    "AnglE",
    "OnlineContrastive",
    "BatchHard",
    "BatchSemiHard",
    "BatchAll",
    "MegaBatch",
    "ContrastiveTensionLossInBatch",
)
"""How the names of losses begin that look at all samples of a batch together."""
LossPair = tuple[Callable[[Any, Batch], torch.Tensor], Callable[[Batch], int]]


def bare_model(trainer: Any) -> Any:
    """The model of transformers, beneath what accelerate or peft put around it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def task_of(trainer: Any) -> str | None:
    """The task of the model's head; None for a head that transformers does not list."""
    from transformers import PreTrainedModel

    model = bare_model(trainer)
    if not isinstance(model, PreTrainedModel):
        return None
    kinds = [kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)]
    for kind in kinds:
        task = task_of_class(kind, model.config, preferred="")
        if task in task_names() and find_task(task).has_head:
            return task
    return None


def is_overridden(trainer: Any, method: str) -> bool:
    """Whether a subclass, or the script itself, put something in the place of a method of Trainer."""
    from transformers import Trainer

    return method in vars(trainer) or getattr(type(trainer), method) is not getattr(Trainer, method)


def origin_of(trainer: Any) -> Origin:
    """Where the loss comes from."""
    if is_overridden(trainer, "compute_loss"):
        return "own"
    if trainer.compute_loss_func is not None:
        return "function"
    if trainer.label_smoother is not None:
        return "smoother"
    return "head" if task_of(trainer) is not None else "own"


def loss_pair(trainer: Any) -> LossPair | None:
    """The sum and the count of a Trainer's loss; None where the labels of the batch say all."""
    function, smoother = trainer.compute_loss_func, trainer.label_smoother
    if function is not None:
        return lambda output, batch: function(output, batch.get("labels"), num_items_in_batch=1), _num_labelled
    if smoother is not None:
        return lambda output, batch: smoother(output, batch["labels"], num_items_in_batch=1), _num_labelled
    return None


def _num_labelled(batch: Batch) -> int:
    """As the Trainer counts."""
    return int((batch["labels"] != IGNORED).sum())


def follows_count(model: Any, batch: Batch) -> bool:
    """Whether a head divides by the `num_items_in_batch` it is given."""
    once, twice = (own_loss(model, batch, num_items_in_batch=torch.tensor(n)) for n in (64, 128))
    return abs(once - twice) > MAX_DIFFERENCE * abs(once)


def own_loss(model: Any, batch: Batch, **keywords: Any) -> float:
    """What the model itself gives as its loss, nothing dropped.

    Raises:
        WorkloadError: it gives none.
    """
    with untouched(model), still(model):
        output = model(**batch, **keywords)
    loss = loss_of(output)
    if loss is None:
        raise WorkloadError(
            [f"{type(model).__name__} gives no loss for samples of {', '.join(batch)}: they have no labels"],
            hint="give every sample `labels`, or start_positions and end_positions",
        )
    return float(loss)


def summed_loss(model: Any, batch: Batch) -> float:
    """The mean that vramfit makes of the same batch out of sums and counts."""
    loss = head_loss(model, batch)
    with untouched(model), still(model):
        sums = loss.sums(model(**model_inputs(batch)), batch)
    return sum(float(s) / n for s, n in zip(sums, loss.counts(batch), strict=True) if n)


def sentence_losses(trainer: Any) -> dict[str, Any]:
    """Losses by dataset, of a trainer of sentence-transformers with one for all under ""; empty for other trainers."""
    if not any(kind.__module__.partition(".")[0] == PACKAGE for kind in type(trainer).__mro__):
        return {}
    loss = getattr(trainer, "loss", None)
    losses = loss if isinstance(loss, dict) else {"": loss}
    return {name: one for name, one in losses.items() if isinstance(one, torch.nn.Module)}


def is_across(loss: Any) -> bool:
    """Whether a loss, or one that it wraps, is known to compare the samples of a batch with each other."""
    return any(type(module).__name__.startswith(ACROSS_SAMPLES) for module in loss.modules())


def is_mean(trainer: Any, name: str, loss: Any) -> bool | None:
    """Whether the loss of a few samples is the mean of their halves'; None where that could not be tried."""
    datasets = trainer.train_dataset
    start = RandomState.now()
    try:
        dataset = datasets[name] if isinstance(datasets, dict) and name else datasets
        rows = [dataset[i] for i in range(NUM_TRIED)]
        with untouched(loss), still(loss):
            whole, first, last = (
                _loss(trainer, loss, part) for part in (rows, rows[: NUM_TRIED // 2], rows[NUM_TRIED // 2 :])
            )
    except Exception:  # anybody's loss, of anybody's rows
        return None
    finally:
        start.restore()
    return abs(whole - (first + last) / 2) <= MAX_DIFFERENCE * max(abs(whole), 1e-6)


def _loss(trainer: Any, loss: Any, rows: list[Any]) -> float:
    batch = each_tensor(trainer.data_collator(rows), lambda value: value.to(trainer.args.device))
    batch.pop("dataset_name", None)
    features, labels = trainer.collect_features(batch)
    found = loss(features, labels)
    return float(sum(found.values()) if isinstance(found, dict) else found)


def way_out(loss: Any) -> str:
    """What to do where a loss compares samples and a step of them does not fit in one pass."""
    names = [type(module).__name__ for module in loss.modules()]
    cached = next((name for name in names if name.startswith(CACHED)), None)
    if cached is not None:
        return (
            f"one pass a step, with a smaller mini_batch_size: {cached} splits a batch by itself and compares all of it"
        )
    negatives = next((name for name in names if name.startswith(NEGATIVES)), None)
    if negatives is not None:
        return f"one pass a step, with Cached{negatives}(mini_batch_size=…), which splits it by itself and compares all"
    return "one pass a step: per_device_train_batch_size as large as the step; bf16 and checkpointing make room for it"
