"""`Retention`: losses kept from step to step whose graphs backward was told not to free, by far the dearest pile."""

from itertools import islice
from types import FrameType
from typing import Any

import torch

from vramfit.monitor.habits import MAX_FRAMES, PILE, place_of
from vramfit.monitor.places import containers_in, tensors_in, user_frames, variables
from vramfit.monitor.retained import RetainedGraphs
from vramfit.records.watch import MemoryFinding
from vramfit.units import format_bytes

RETAINED = "watch.graphs-retained"


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
