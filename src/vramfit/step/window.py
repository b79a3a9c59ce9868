"""The window: one effective batch in micro-batches, its losses summed and divided by the count of the whole.

Everything before the optimizer's step can be dropped and done again; the step is the commit.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from vramfit.step.inputs import Batch
from vramfit.step.plain import Autocast, OnPart
from vramfit.tasks.parts.losses import HeadLoss

Model = Callable[..., Any]


def accumulate(
    model: torch.nn.Module,
    batches: Sequence[Batch],
    loss: HeadLoss,
    totals: Sequence[int],
    *,
    bring: Callable[[Batch], Batch] = lambda batch: batch,
    autocast: Autocast = nullcontext,
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
    on_part: OnPart = lambda part, index: None,
    on_output: Callable[[Any, Batch], None] = lambda output, batch: None,
    num_counted: int | None = None,
) -> torch.Tensor:
    """Forward and backward over the micro-batches; gradients of the mean loss of all of them are left.

    Args:
        batches: the micro-batches.
        bring: puts one on the device when its turn comes.
        totals: the counts of the whole effective batch, one for each term of the loss.
        scale: of a GradScaler.
        on_output: sees what the model gave for each micro-batch.
        num_counted: micro-batches that count, the first ones; later ones are only passed through the model, where it
            runs on several processes that wait for each other. None counts all.

    Returns:
        The loss of the effective batch, detached.
    """
    mean: torch.Tensor | None = None
    for index, waiting in enumerate(batches):
        on_part("forward", index)
        batch = bring(waiting)
        with autocast():
            output = model(**loss.inputs(batch))
            on_output(output, batch)
            terms = [s / n for s, n in zip(loss.sums(output, batch), totals, strict=True) if n]
            value = torch.stack(terms).sum() if len(terms) > 1 else terms[0]
            if num_counted is not None and index >= num_counted:
                value = value * 0
        del output, terms
        on_part("backward", index)
        scale(value).backward()
        on_part("forward", index)
        mean = value.detach().clone() if mean is None else mean.add_(value.detach())
        del value, batch
    assert mean is not None, "a window has at least one micro-batch"
    return mean


def clip(parameters: Sequence[torch.nn.Parameter], max_grad_norm: float | None) -> None:
    """Clip once, on the accumulated gradient."""
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
