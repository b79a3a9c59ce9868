"""`RetainedGraphs`: passes whose graph a backward pass did not free, and which of them are still alive."""

import sys
from collections import deque
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any
from weakref import ref

import torch

from vramfit.monitor.places import user_line

MAX_NODES = 500
"""Of a graph that is searched for the output of a model: between that and a loss there are few."""


class OutputHook:
    """A hook on a model's output: it lives as long as the graph behind it does."""

    __torch_unserializable__ = True  # a tensor that is saved needs no warning

    def __init__(self, node: Any, forward_number: int, tell: "Callable[[OutputHook], None]") -> None:
        self.forward_number = forward_number
        self.node_number = int(node._sequence_nr())
        self._tell = tell

    def __call__(self, gradient: torch.Tensor) -> None:
        self._tell(self)


class RetainedGraphs:
    """Sees `retain_graph=True`, which hooks are not told: it stands in for both functions that take it."""

    def __init__(self, guard: Callable[[Callable[[], None]], None]) -> None:
        self.source = ""
        """file:line of the last backward pass that kept its graph."""
        self.option = ""
        """What it was told."""
        self._guard = guard
        self._retains = False
        self._alive: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []

    @property
    def num_alive(self) -> int:
        """Passes whose graph was kept by backward, and by something else since."""
        return len(self._alive)

    def start(self) -> None:
        for owner in (torch.Tensor, torch.autograd):
            self._stand_in(owner)

    def stop(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def backward(self, hook: OutputHook) -> None:
        """A backward pass goes through the graph of a forward pass."""
        number = hook.node_number
        if self._retains:
            self._alive[number] = ref(hook, lambda _: self._alive.pop(number, None))
        else:
            self._alive.pop(number, None)  # now it is freed

    def num_kept_by(self, tensor: torch.Tensor) -> int:
        """How many of these graphs a tensor keeps, as far as they lie near."""
        waiting, seen, found = deque([tensor.grad_fn]), 0, set()
        while waiting and seen < MAX_NODES:
            node: Any = waiting.popleft()
            if node is None:
                continue
            seen += 1
            if node._sequence_nr() in self._alive:
                found.add(node._sequence_nr())
            else:
                waiting.extend(following for following, _ in node.next_functions)
        return len(found)

    def _begin(self, frame: FrameType, option: str) -> None:
        self._retains = bool(option)
        if option:
            self.source, self.option = user_line(frame) or self.source, option

    def _stand_in(self, owner: Any) -> None:
        original = owner.backward

        @wraps(original)
        def backward(*args: Any, **keywords: Any) -> Any:
            before, frame = self._retains, sys._getframe(1)
            self._guard(lambda: self._begin(frame, _option(*args, **keywords)))
            try:
                return original(*args, **keywords)
            finally:
                self._retains = before

        def undo() -> None:
            if owner.backward is backward:
                owner.backward = original

        owner.backward = backward
        self._undo.append(undo)


def _option(
    tensors: Any = None,
    gradients: Any = None,
    retain_graph: Any = None,
    create_graph: Any = False,
    *args: Any,
    **kw: Any,
) -> str:
    """The argument that has autograd keep the graph; empty where it is freed."""
    keeps = create_graph if retain_graph is None else retain_graph
    return ("create_graph=True" if create_graph else "retain_graph=True") if keeps else ""
