"""The loss of a Trainer: whose it is, and the sum it stands for."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from vramfit.errors import WorkloadError
from vramfit.integrations.trainer.sentence_losses import encoder_in
from vramfit.models.tasks import task_of_class
from vramfit.runtime.model_state import untouched
from vramfit.step.own_loss import still
from vramfit.step.plain import Batch
from vramfit.tasks import find_task, task_names
from vramfit.tasks.base import IGNORED
from vramfit.tasks.parts.losses import head_loss, loss_of, model_inputs

Origin = Literal["head", "smoother", "function", "texts", "own"]
MAX_DIFFERENCE = 1e-3
"""Of a head's loss against the mean that vramfit takes; half precision stays below."""

LossPair = tuple[Callable[[Any, Batch], torch.Tensor], Callable[[Batch], int]]


def bare_model(trainer: Any) -> Any:
    """The model of transformers, beneath what accelerate, peft or sentence-transformers put around it."""
    model = encoder_in(trainer.accelerator.unwrap_model(trainer.model))
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def step_model(trainer: Any) -> Any:
    """The model that the passes of a step go through: the encoder, where sentence-transformers has more around it."""
    return encoder_in(trainer.model)


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
