"""What depends on how a batch is split: found, and named, before it is learned from."""

from collections.abc import Callable
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.monitor.places import warn_user
from vramfit.step.plain import Batch

IN_BATCH = ("contrastive", "infonce", "multiplenegatives", "ntxent", "gistembed", "tripletsemihard", "supcon", "clip")
"""Losses that compare the samples of a batch with each other, by parts of their names."""
MAX_DIFFERENCE = 1e-3
"""Of a loss over two samples against the sum over each; rounding in half precision stays below."""


def across_samples(model: torch.nn.Module) -> list[str]:
    """Modules whose result for one sample depends on the others of its micro-batch, in words."""
    return [
        f"{name or type(module).__name__} is a {type(module).__name__}: its result depends on the micro-batch, so no "
        "split gives the same training"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training
    ][:1]


def warn_of_names(model: torch.nn.Module, loss_fn: Any) -> None:
    """A warning where a name says that a loss compares samples with each other."""
    named = [] if loss_fn is None else [getattr(loss_fn, "__name__", type(loss_fn).__name__)]
    named += [type(module).__name__ for module in model.modules()]
    for name in named:
        if any(part in name.lower().replace("_", "") for part in IN_BATCH):
            warn_user(
                f"{name} looks like a loss over pairs of a batch: in micro-batches it sees fewer of them, and learns "
                "something else; give micro_batch the whole batch, or a loss that caches its embeddings"
            )
            return


def check_once(loss_fn: Callable[[Any, Batch], torch.Tensor] | None) -> Callable[[Any, Batch], None]:
    """What looks at the outputs of passes: a loss of the user's is checked on the first of them."""
    waiting = [] if loss_fn is None else [loss_fn]

    def see(output: Any, batch: Batch) -> None:
        while waiting:
            check_loss(waiting[-1], output, batch)
            waiting.pop()

    return see


@torch.no_grad()
def check_loss(loss_fn: Callable[[Any, Batch], torch.Tensor], output: Any, batch: Batch) -> None:
    """Refuse a loss of two samples that is not the sum of their losses.

    Raises:
        WorkloadError: a mean in place of a sum, or a loss that compares samples with each other.
    """
    num_samples = next(iter(batch.values())).shape[0]
    if num_samples < 2:
        return
    both, first, second = (
        float(loss_fn(_rows(output, rows, num_samples), _rows(batch, rows, num_samples)))
        for rows in (slice(0, 2), slice(0, 1), slice(1, 2))
    )
    scale = max(abs(first), abs(second), abs(both), 1e-6)
    if abs(first + second - both) > MAX_DIFFERENCE * scale:
        raise WorkloadError(
            [
                f"loss_fn gives {both:.4g} for two samples, and {first:.4g} and {second:.4g} for each alone: not their "
                "sum, so the result would depend on the split"
            ],
            hint="return a sum (reduction='sum') over the samples, and their number from count_fn; losses that compare "
            "samples with each other need the whole batch in one micro-batch",
        )


def _rows(value: Any, rows: slice, num_samples: int) -> Any:
    """The same structure with some samples of every tensor that has one row for each."""
    if isinstance(value, torch.Tensor):
        return value.detach()[rows] if value.dim() and value.shape[0] == num_samples else value
    if isinstance(value, dict):
        made = {name: _rows(item, rows, num_samples) for name, item in value.items()}
        return made if type(value) is dict else type(value)(**made)
    if isinstance(value, list | tuple):
        return type(value)(_rows(item, rows, num_samples) for item in value)
    return value
