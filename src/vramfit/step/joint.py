"""Passes of a step whose loss looks at the vectors of all texts at once: gradients of the whole batch, pass by pass.

The vectors of all texts are made first, without a graph, in as many passes as the memory wants. Then come the loss and
its gradient for each vector. Then every pass runs again, with a graph and the random numbers it had, and its vectors
take their gradients back to the weights. That is the gradient of the undivided batch, in the memory of one pass and of
the vectors. Where one pass holds the batch, it keeps its graph and runs once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.step.random_state import RandomState
from vramfit.tasks.parts.joint import PLACES, JointLoss
from vramfit.tasks.parts.losses import Batch, HeadLoss

if TYPE_CHECKING:
    from vramfit.step.step import Step

ROOM, LOSS, END = "vectors", "joint", "done"
"""What a step does beside its passes: room for the vectors, the loss, the end of the gradients."""
FIRST = "embed"
"""How the first passes of each micro-batch are called, those without a graph."""


def joint_passes(step: "Step", parts: Sequence[Batch], loss: HeadLoss, num_counted: int) -> torch.Tensor:
    """Leave the gradients of the mean loss of all micro-batches.

    Args:
        num_counted: micro-batches that count, the first ones; later ones are dummy passes.

    Returns:
        This rank's share of the loss, detached.
    """
    joint = loss.joint
    assert joint is not None
    runs_once = len(parts) == 1
    first = 0 if runs_once else ROOM
    step.on_part("forward", first)
    vectors = joint.room(step.parameters[0].device)
    states: list[RandomState | None] = []
    kept: Any = None
    for index, waiting in enumerate(parts):
        step.on_part("forward", 0 if runs_once else f"{FIRST}{index}")
        step.ranks.before_pass(index, len(parts))
        states.append(_random_state(vectors))
        batch = step.bring(waiting)
        with torch.set_grad_enabled(runs_once):
            found = _vectors(step, loss, batch)
        if index < num_counted:
            vectors.index_copy_(0, batch[PLACES], found.detach())
        kept = (found, batch) if runs_once else None
        del found, batch
    step.on_part("forward", 0 if runs_once else LOSS)
    step.ranks.bring_together(vectors)
    value = joint.of_vectors(vectors.requires_grad_())
    step.on_part("backward", 0 if runs_once else LOSS)
    value.backward()
    gradient, value = vectors.grad, value.detach()
    assert gradient is not None
    del vectors
    mean: torch.Tensor | None = None
    for index, waiting in enumerate(parts):
        step.begin("forward", index, len(parts))
        if mean is None:
            mean = value / step.ranks.size
        if kept is None:
            _restore(states[index])
            batch = step.bring(waiting)
            found = _vectors(step, loss, batch)
        else:
            (found, batch), kept = kept, None
        pull = (found * gradient.index_select(0, batch[PLACES])).sum()
        if index >= num_counted:
            pull = pull * 0
        del found, batch
        step.begin("backward", index, len(parts))
        step.scaled(pull).backward()
        step.begin("forward", index, len(parts))
        del pull
    step.on_part("forward", 0 if runs_once else END)
    assert mean is not None
    del gradient, value
    return mean


def _vectors(step: "Step", loss: HeadLoss, batch: Batch) -> torch.Tensor:
    with step.autocast():
        return step.model(**loss.inputs(batch)).embedding


def _random_state(vectors: torch.Tensor) -> RandomState | None:
    """None where nothing is drawn: without data."""
    if vectors.is_meta:
        return None
    with _disable_current_modes():
        return RandomState.now()


def _restore(state: RandomState | None) -> None:
    if state is not None:
        with _disable_current_modes():
            state.restore()


__all__ = ["END", "FIRST", "LOSS", "ROOM", "JointLoss", "joint_passes"]
