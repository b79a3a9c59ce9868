"""Graphs that backward was told not to free: which passes are still alive, and who keeps them."""

import sys
from collections import deque
from collections.abc import Callable
from functools import wraps
from itertools import islice
from types import FrameType
from typing import Any
from weakref import ref

import torch

from vramfit.monitor.habits import MAX_FRAMES, PILE, place_of
from vramfit.monitor.places import containers_in, tensors_in, user_frames, user_line, variables
from vramfit.records.watch import MemoryFinding
from vramfit.units import format_bytes

MAX_NODES = 500
"""Of a graph that is searched for the output of a model: between that and a loss there are few."""
RETAINED = "watch.graphs-retained"


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


class Retention:
    """Looks for who keeps the graphs that `retain_graph=True` has left."""

    def __init__(self, graphs: RetainedGraphs) -> None:
        self.finding: MemoryFinding | None = None
        self._graphs = graphs
        self._named = False
        self._last: tuple[int, int] = (0, 0)
        self._each: int | None = None

    def look(self, frame: FrameType, module: str, held: int | None) -> None:
        """Look through the user's variables, if graphs of more than a few passes are alive."""
        num = self._graphs.num_alive
        each = self._bytes_each(num, held)
        if num <= PILE or (self.finding is not None and each * num < self.finding.num_bytes):
            return
        holder = self._holder(frame)
        if holder is not None or not self._named:
            self._named = holder is not None
            self.finding = self._made(holder, module, num, each)

    def _bytes_each(self, num: int, held: int | None) -> int:
        """What a graph takes: the least by which memory has grown with one; 0 where nothing tells."""
        before, then = self._last
        self._last = num, held or 0
        if before and num > before and held is not None:
            grown = max(held - then, 0) // (num - before)
            self._each = grown if self._each is None else min(self._each, grown)
        return self._each or 0

    def _holder(self, frame: FrameType) -> tuple[str, str] | None:
        """The variable that keeps the most, or what lies inside it, in words that lead there, and file:line."""
        found: list[tuple[int, int, FrameType, str]] = []
        for user in islice(user_frames(frame), MAX_FRAMES):
            for name, value in variables(user):
                for words, inside in containers_in(name, value):
                    if self._keeps(inside):
                        found.append((sum(1 for _ in tensors_in(inside)), len(words), user, words))
        if not found:
            return None
        _, _, user, words = max(found, key=lambda each: each[:2])
        return words, place_of(user, words)

    def _keeps(self, value: Any) -> bool:
        """Whether the tensors that came last keep graphs, each one of them; or one does alone, as a sum."""
        if isinstance(value, torch.Tensor):
            return value.grad_fn is not None and self._graphs.num_kept_by(value) > PILE
        newest = list(islice(reversed(list(tensors_in(value))), PILE))
        return len(newest) == PILE and all(t.grad_fn is not None and self._graphs.num_kept_by(t) for t in newest)

    def _made(self, holder: tuple[str, str] | None, module: str, num: int, each: int) -> MemoryFinding:
        at, option = self._graphs.source, self._graphs.option
        name, source = holder or ("", at)
        took = f": {format_bytes(each)} a pass, {format_bytes(each * num)} so far" if each else ""
        return MemoryFinding(
            check=RETAINED,
            module=module,
            source=source,
            num_bytes=each * num,
            what=f"{f'`{name}`' if name else 'something'} keeps the graphs of {num} forward passes, which "
            f"backward({option}) at {at} did not free{took}",
            why="a loss or an output that is kept keeps all activations of its step, which backward frees unless it is "
            "told to retain them",
            fix=f"drop {option} at {at}, or keep loss.detach() or loss.item()" + (f" in `{name}`" if name else ""),
        )
