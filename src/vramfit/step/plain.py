"""The plain step: what the usual PyTorch loop does, mean loss and all.

`on_part` is called as the step goes from one part to the next (forward, backward, optimizer), with the index
of the micro-batch; a prediction and a run listen to the same calls.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from vramfit.step.inputs import Batch
from vramfit.tasks.parts.losses import loss_to_learn_from, taken_by

OnPart = Callable[[str, int], None]
Autocast = Callable[[], AbstractContextManager[Any]]


class Scaler(Protocol):
    """The part of `torch.amp.GradScaler` that a step uses."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None: ...
    def step(self, optimizer: torch.optim.Optimizer) -> Any: ...
    def update(self) -> None: ...


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    autocast: Autocast = nullcontext,
    scaler: Scaler | None = None,
    max_grad_norm: float | None = None,
    on_part: OnPart = lambda part, index: None,
) -> None:
    """One optimizer step over its micro-batches; the loss of each is divided by their number."""
    for index, batch in enumerate(batches):
        on_part("forward", index)
        with autocast():
            output = model(**taken_by(model, batch))
        loss = loss_to_learn_from(model, output, batch) / len(batches)
        on_part("backward", index)
        (loss if scaler is None else scaler.scale(loss)).backward()
        on_part("forward", index)
        del loss, output
    on_part("optimizer", 0)
    if max_grad_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        learned = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(learned, max_grad_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)


def forward_step(
    model: torch.nn.Module,
    batch: Batch,
    *,
    grad: bool,
    autocast: Autocast = nullcontext,
    on_part: OnPart = lambda part, index: None,
) -> None:
    """One forward pass; with `grad`, everything a backward pass would need is kept until it ends."""
    on_part("forward", 0)
    with torch.set_grad_enabled(grad), autocast():
        output = model(**batch)
    del output
