"""What a program leaves behind, pass by pass and step by step; and graphs that backward was told not to free."""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import islice
from types import FrameType
from typing import Any
from weakref import ref

import torch

from vramfit.monitor.habits import MAX_FRAMES, PILE, Candidate, GrowingContainers, KeptGraphs, Look, Padding, place_of
from vramfit.monitor.ledger import Ledger, leak_findings
from vramfit.monitor.places import containers_in, tensors_in, user_frames, user_line, variables
from vramfit.records.watch import MemoryFinding, WatchPhase
from vramfit.units import format_bytes

MAX_NODES = 500
"""Of a graph that is searched for the output of a model: between that and a loss there are few."""
RETAINED = "watch.graphs-retained"
LOOKS_UNTIL = 8
"""Rounds after each of which the user's variables are looked through; from then on at powers of two."""


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


class Noticing:
    """Follows a program's passes and steps, and notices what they leave behind.

    A round is a step, or a batch of an evaluation.

    Args:
        ledger: everything that is alive, where that is recorded.
        owns: whether a tensor lies in the memory that is watched.
        categories: storages that belong to models and optimizers.
        on_host: whether the memory that is watched is the host's.
        retained: graphs that backward passes did not free.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        owns: Callable[[torch.Tensor], bool],
        categories: Callable[[], dict[int, str]],
        on_host: Callable[[], bool],
        retained: RetainedGraphs,
    ) -> None:
        self.model_name = ""
        """Class of the model that was called last."""
        self._ledger = ledger
        self._owns = owns
        self._categories = categories
        self._on_host = on_host
        self._retention = Retention(retained)
        self._graphs, self._growing, self._padding = KeptGraphs(), GrowingContainers(), Padding()
        self._leaks: dict[str, tuple[WatchPhase, MemoryFinding]] = {}
        self._line = ""
        self._before: int | None = None
        self._open: Candidate | None = None
        self._round = 0
        self._evaluates = False
        self._first_round: int | None = None

    def wants_output(self, model: torch.nn.Module, number: int) -> bool:
        """Whether there is anything to learn from the end of a pass."""
        return not model.training or self._padding.wants(number)

    def forward(self, model: torch.nn.Module, inputs: dict[str, Any], number: int, held: int | None, line: str) -> None:
        """A model is called, for the `number`th time, from a line of the user's, with so much held."""
        self.model_name, self._line, self._before = type(model).__name__, line, held
        self._graphs.settle(number)
        if self._padding.wants(number):
            self._padding.look(inputs, line)
        records = not model.training and torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        self._open = Candidate(self.model_name, line, 0, number) if records else None

    def output(self, output: Any, held: int | None) -> None:
        """A model has given its output."""
        if output is None:
            return  # it was cut short
        grown = self._grown(held)
        self._padding.took(grown)
        if self._open is not None and any(tensor.requires_grad for tensor in tensors_in(output)):
            self._open.num_bytes = grown
            self._graphs.add(self._open)
        self._open = None

    def cut_short(self, held: int | None) -> None:
        """Memory ran out; an evaluation pass that recorded a graph had its share in it."""
        if self._open is not None:
            self._open.num_bytes = self._grown(held)
            self._graphs.add(self._open)
            self._graphs.settle(self._open.forward_number + 1)
            self._open = None

    def backward(self, forward_number: int) -> None:
        self._graphs.backward(forward_number)

    def next_round(self, frame: FrameType, *, evaluating: bool, held: int | None) -> bool:
        """A round is over; whether this one was looked at."""
        if evaluating != self._evaluates:
            self._round, self._evaluates = 0, evaluating
        self._round += 1
        if self._round == 2:  # the first step brings optimizer state
            self._first_round = held
        if self._ledger is not None:
            self._ledger.next_round()
        if self._round > LOOKS_UNTIL and self._round & (self._round - 1):
            return False
        self.look(frame, held)
        return True

    def finish(self, frame: FrameType, number: int, held: int | None) -> None:
        """The program has ended, after so many passes."""
        self._graphs.settle(number + 1)
        self.look(frame, held)

    def look(self, frame: FrameType, held: int | None) -> None:
        """Look for what piles up: in the user's variables, and in detail among all that is alive."""
        grown = held - self._first_round if held is not None and self._first_round is not None else 0
        look = Look(
            module=self.model_name,
            evaluating=self._evaluates,
            grown_bytes=grown,
            owns=self._owns,
            origin=self._ledger.origin if self._ledger is not None else lambda tensor: None,
            on_host=self._on_host(),
        )
        self._growing.look(frame, look)
        self._retention.look(frame, self.model_name, held)
        if self._ledger is not None:
            for phase, leak in leak_findings(self._ledger.leaks(self._categories())):
                known = self._leaks.get(leak.source)
                if known is None or leak.num_bytes >= known[1].num_bytes:
                    self._leaks[leak.source] = phase, leak

    def findings(self, *, sized: bool) -> tuple[MemoryFinding, ...]:
        """All that was found, the largest first.

        Args:
            sized: whether there is an allocator that tells bytes.
        """
        retained = self._retention.finding
        where = "" if retained is None else retained.source
        found = [f for f in self._growing.findings() if f.check != "watch.graphs-kept" or f.source != where]
        found += [*self._graphs.findings(sized=sized), *([] if retained is None else [retained])]
        padding = self._padding.finding(self.model_name)
        found += [padding] if padding is not None else []
        found += self._unexplained_leaks(found)
        return tuple(sorted(found, key=lambda f: -f.num_bytes))

    def _grown(self, held: int | None) -> int:
        return max(held - self._before, 0) if held is not None and self._before is not None else 0

    def _unexplained_leaks(self, found: Sequence[MemoryFinding]) -> list[MemoryFinding]:
        """Leaks that no other finding names: not on the same line, nor kept by a graph that is named."""
        named = {finding.source for finding in found}
        graph_kept = any(finding.check == "watch.eval-keeps-graph" for finding in found)
        retained = any(finding.check == RETAINED for finding in found)
        return [
            leak
            for source, (phase, leak) in list(self._leaks.items())
            if source not in named and not (graph_kept if phase == "evaluation" else retained)
        ]
