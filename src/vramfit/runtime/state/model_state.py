"""`ModelState`: what passes change beside gradients, kept before a window and put back where it is done again.

Buffers, numbers, lists, arrays and random generators, in modules and in objects of the user's own that modules hold.
What objects of libraries hold is left alone: they keep account of what is really there.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.runtime.random_state import RandomState
from vramfit.runtime.state.names import HeldValue
from vramfit.runtime.state.search import Holder, StateSearch
from vramfit.runtime.state.tensors import HeldTensors, lost

MAX_NAMED = 3
"""Things that are named where many are meant."""


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Passes inside leave the model's state and the random generators as they were."""
    state = ModelState(model)
    state.keep()
    try:
        yield
    finally:
        state.put_back(is_tried_out=True)


class ModelState:
    """The state of a model.

    Args:
        model: whose state it is.
        loss: a function or a module that passes call beside it.
    """

    def __init__(self, model: torch.nn.Module, *, loss: Any = None) -> None:
        self.model = model
        self.moving: tuple[str, ...] = ()
        """What the first window changed, but for random generators: how often it changes depends on the split."""
        self.moves_in_python = False
        """Whether that was anything but the content of tensors."""
        self._loss = loss
        self._random: RandomState | None = None
        self._holders: list[Holder] = []
        self._tensors = HeldTensors()
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._versions: list[int] = []
        self._values: list[HeldValue] = []
        self._beside: StateSearch | None = None
        self.is_settled = False
        """Whether a window has shown what passes change."""

    def keep(self, *, beside: Any = None) -> None:
        """Hold everything as it is now.

        Args:
            beside: an object whose own numbers, lists of such and tensors are state too, until `let_go`.
        """
        with _disable_current_modes():
            self._random = RandomState.now()
            known = all(holder.is_same() or holder.renew(self._tensors) for holder in self._holders)
            if not self._holders or not known:
                self._find()
            self._tensors.keep()
            for value in self._values:
                value.keep()
            self._versions = self._versions_now()
            if beside is not None:
                self._beside = StateSearch(self._tensors, (), is_first=False)
                self._beside.look_beside(beside)
                self._beside.tensors.keep()

    def let_go(self) -> None:
        """Of what was kept beside the model."""
        self._beside = None

    def settle(self) -> None:
        """A window went through: the first one shows what passes change.

        Raises:
            WorkloadError: they change what cannot be put back.
        """
        for path in self._changed_weights():  # from now on they are copied before a window, as buffers are
            self._tensors.add(self._weights.pop(path), path).moves = True
        self._versions = self._versions_now()
        if self.is_settled:
            for tensor in self._tensors:
                tensor.moves = tensor.moves or tensor.has_moved()
            return
        with _disable_current_modes():
            rebound = [path for holder in self._holders for path in holder.moved()]
            for tensor in self._tensors:
                tensor.settle()
            values = [value for value in self._values if value.has_moved()]
        in_place = [tensor.path for tensor in self._tensors if tensor.moves]
        self.moving = (*in_place, *rebound, *(value.path for value in values if not value.is_generator))
        self.moves_in_python = bool(rebound or values)
        self.is_settled = True

    def put_back(self, *, is_tried_out: bool = False) -> None:
        """Let everything be as it was kept.

        Args:
            is_tried_out: the passes were for nothing: what they did to weights, of which there is no copy, stays.

        Raises:
            WorkloadError: something has changed of which nobody knows what it was.
        """
        assert self._random is not None, "nothing was kept"
        for path in [] if is_tried_out else self._changed_weights():
            raise lost(path, "and it is a weight that no pass before had changed")
        with _disable_current_modes():
            beside = [] if self._beside is None else self._beside.holders
            for holder in (*self._holders, *beside):
                holder.put_back()
            for tensor in self._tensors:
                if tensor.is_there and (tensor.has_copy or not is_tried_out):
                    tensor.put_back()
            for value in self._values:
                value.put_back()
            self._random.restore()

    def warn_of_splits(self) -> None:
        """A warning where results depend on how many passes a window has."""
        if not self.moving:
            return
        more = f" and {len(self.moving) - MAX_NAMED} more" if len(self.moving) > MAX_NAMED else ""
        warnings.warn(
            f"every forward pass changes {', '.join(self.moving[:MAX_NAMED])}{more}: what depends on these values "
            "depends on how many passes a batch is split into, and on checkpointing, in which layers pass twice; a "
            "step that is done again in the same micro-batches is the same to the bit",
            stacklevel=4,
        )

    def _changed_weights(self) -> list[str]:
        """Those that were changed in place since they were kept."""
        now = self._versions_now()
        if now == self._versions:
            return []
        return [path for path, new, old in zip(self._weights, now, self._versions, strict=True) if new != old]

    def _versions_now(self) -> list[int]:
        return [weight._version for weight in self._weights.values()]

    def _find(self) -> None:
        search = StateSearch(self._tensors, self.moving, is_first=not self._holders)
        search.look_at(self.model)
        search.look_at_call(self._loss, "loss_fn")
        search.hold()
        self._holders, self._values = search.holders, search.values
        weights = search.weights.items()
        for path, weight in weights:
            if self._tensors.of(weight) is not None:  # a weight that passes change
                search.tensors.add(weight, path, self._tensors)
        self._tensors = search.tensors
        self._weights = {path: weight for path, weight in weights if search.tensors.of(weight) is None}
