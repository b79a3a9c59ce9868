"""Passes of a step whose loss looks at the vectors of all texts at once: gradients of the whole batch, pass by pass.

The vectors of all texts are made first, without a graph, in as many passes as the memory wants. Then come the loss and
its gradient for each vector. Then every pass runs again, with a graph and the random numbers it had, and its vectors
take their gradients back to the weights. That is the gradient of the undivided batch, in the memory of one pass and of
the vectors. Where one pass holds the batch, it keeps its graph and runs once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.step.plain import Batch, each_tensor
from vramfit.step.recovery import RandomState
from vramfit.tasks.parts.joint import PLACES
from vramfit.tasks.parts.losses import HeadLoss

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
    passes = JointPasses(step, parts, loss, num_counted)
    passes.embed()
    passes.compare()
    return passes.learn()


class JointPasses:
    """The passes of one step; what it holds is let go of as soon as it can be."""

    def __init__(self, step: "Step", parts: Sequence[Batch], loss: HeadLoss, num_counted: int) -> None:
        assert loss.joint is not None
        self._step, self._parts, self._loss, self._joint = step, parts, loss, loss.joint
        self._num_counted = num_counted
        self._runs_once = len(parts) == 1
        self._vectors: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None
        self._value: torch.Tensor | None = None
        self._states: list[RandomState | None] = []
        self._kept: tuple[torch.Tensor, Batch] | None = None
        """Vectors with their graph, where one pass holds the batch."""

    def embed(self) -> None:
        """Make the vectors of all texts."""
        step = self._step
        self._tell("forward", ROOM)
        vectors = self._joint.room(step.device)
        for index, waiting in enumerate(self._parts):
            self._tell("forward", f"{FIRST}{index}")
            step.ranks.before_pass(index, len(self._parts))
            self._states.append(_random_state(vectors))
            batch = step.bring(waiting)
            with torch.set_grad_enabled(self._runs_once):
                found = self._pass(batch)
            if index < self._num_counted:
                vectors.index_copy_(0, batch[PLACES], found.detach())
            if self._runs_once:
                self._kept = found, batch
            del found, batch
        self._vectors = vectors

    def compare(self) -> None:
        """Take the loss of all vectors, and its gradient for each."""
        assert self._vectors is not None
        self._tell("forward", LOSS)
        if not self._runs_once:
            self._step.ranks.rest()
        self._step.ranks.bring_together(self._vectors)
        labels = each_tensor(self._joint.labels, self._step.place)
        value = self._joint.of_vectors(self._vectors.requires_grad_(), labels)
        self._tell("backward", LOSS)
        value.backward()
        self._gradient, self._value, self._vectors = self._vectors.grad, value.detach(), None
        del labels

    def learn(self) -> torch.Tensor:
        """Take the gradients of the vectors back to the weights; gives this rank's share of the loss."""
        step, gradient, value = self._step, self._gradient, self._value
        assert gradient is not None
        assert value is not None
        mean: torch.Tensor | None = None
        for index, waiting in enumerate(self._parts):
            step.begin("forward", index, len(self._parts))
            mean = value / step.ranks.size if mean is None else mean
            found, batch = self._again(index, waiting)
            pull = (found * gradient.index_select(0, batch[PLACES])).sum()
            if index >= self._num_counted:
                pull = pull * 0
            del found, batch
            step.begin("backward", index, len(self._parts))
            step.scaled(pull).backward()
            step.begin("forward", index, len(self._parts))
            del pull
        if mean is None:  # a rank without texts of its own
            mean = value / step.ranks.size
        del gradient, value
        self.end()
        return mean

    def end(self) -> None:
        """Let go of the gradients of the vectors."""
        self._tell("forward", END)
        self._gradient = self._value = None

    def _again(self, index: int, waiting: Batch) -> tuple[torch.Tensor, Batch]:
        """The vectors of a micro-batch with their graph."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
        _restore(self._states[index])
        batch = self._step.bring(waiting)
        return self._pass(batch), batch

    def _pass(self, batch: Batch) -> torch.Tensor:
        with self._step.autocast():
            return self._joint.vectors_of(self._step.model(**self._loss.inputs(batch)))

    def _tell(self, part: str, name: str) -> None:
        """What is done beside passes; part of the only pass, where there is one."""
        self._step.on_part(part, 0 if self._runs_once else name)


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
