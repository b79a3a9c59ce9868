"""`Noticing`: when to look for which habit, and what was found by all of them together."""

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from vramfit.monitor.habits import Candidate, KeptGraphs, Look, Padding, Piles
from vramfit.monitor.ledger import Ledger, leak_findings
from vramfit.monitor.places import tensors_in
from vramfit.monitor.retained_graphs import RETAINED, RetainedGraphs, Retention
from vramfit.records.watch import MemoryFinding, WatchPhase

LOOKS_UNTIL = 8
"""Rounds after each of which the user's variables are looked through; from then on at powers of two."""


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
        self._graphs, self._piles, self._padding = KeptGraphs(), Piles(), Padding()
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
        self._piles.look(frame, look)
        self._retention.look(frame, self.model_name, held)
        if self._ledger is not None:
            for phase, leak in leak_findings(self._ledger.leaks(self._categories())):
                known = self._leaks.get(leak.source)
                if known is None or leak.num_bytes >= known[1].num_bytes:
                    self._leaks[leak.source] = phase, leak

    def findings(self, *, sized: bool) -> tuple[MemoryFinding, ...]:
        """All that was found, the dearest first.

        Args:
            sized: whether there is an allocator that tells bytes.
        """
        retained = self._retention.finding
        where = "" if retained is None else retained.source
        found = [f for f in self._piles.findings() if f.check != "watch.graphs-kept" or f.source != where]
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
