"""Habits that cost memory, noticed while a program runs: graphs kept in evaluation, tensors piled up, padding."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.monitor.ledger import StorageOrigin
from vramfit.monitor.places import CONTAINERS, line_that_fills, place, tensors_in, user_frames, variables
from vramfit.records.watch import MemoryFinding
from vramfit.units import format_bytes

MIN_GRAPH_BYTES = 2**20
"""A graph of an evaluation pass that holds less is not worth a word."""
PILE = 3
"""So many tensors in a growing container count as growing."""
MIN_PILE_BYTES = 2**16
SUM_DEPTH = 3
"""Losses added to each other that make a sum over steps."""
MIN_BATCHES_SEEN = 3
MAX_USED_SHARE = 0.85
"""Of a batch's width; where the longest sample uses more, padding to the longest would gain little."""
MAX_FRAMES = 12


class Padding:
    """How much of each batch lies beyond its longest sample."""

    def __init__(self) -> None:
        self._widths: set[int] = set()
        self._used: list[float] = []
        self._longest: list[int] = []
        self._source = ""
        self._bytes = 0

    def wants(self, forward_number: int) -> bool:
        """To look at a mask waits for the GPU: the first few batches, then ever fewer."""
        return forward_number <= 4 or forward_number & (forward_number - 1) == 0

    def look(self, inputs: dict[str, Any], source: str) -> None:
        mask = inputs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.is_meta:
            return
        with _disable_current_modes(), torch.no_grad():
            lengths = (mask.detach().to("cpu") != 0).sum(dim=1)
            longest = int(lengths.max()) if lengths.numel() else 0
        self._widths.add(mask.shape[1])
        self._used.append(longest / max(mask.shape[1], 1))
        self._longest.append(longest)
        self._source = source or self._source

    def took(self, num_bytes: int) -> None:
        """Bytes that a forward pass left behind for backward, or took at all."""
        self._bytes = max(self._bytes, num_bytes)

    def finding(self, module: str) -> MemoryFinding | None:
        if len(self._used) < MIN_BATCHES_SEEN or len(self._widths) != 1:
            return None
        used = sum(self._used) / len(self._used)
        if used > MAX_USED_SHARE:
            return None
        width, longest = next(iter(self._widths)), max(self._longest)
        num_bytes = int(self._bytes * (1 - used))
        held = f", about {format_bytes(num_bytes)} of its activations" if num_bytes else ""
        return MemoryFinding(
            check="watch.padding",
            module=module,
            source=self._source,
            num_bytes=num_bytes,
            what=f"every batch is {width} tokens wide and its longest sample {width * used:.0f} on average (at most "
            f"{longest} of {len(self._used)} seen): {1 - used:.0%} of each batch is padding for nothing{held}",
            why='padding="max_length" pads to the limit of the model; attention and every layer work on it',
            fix='padding="longest" in the tokenizer call, or no padding there and DataCollatorWithPadding in the '
            "loader; packed attention (vramfit plan --attention packed) drops the rest too",
        )


@dataclass(slots=True)
class Candidate:
    """An evaluation pass that made a graph."""

    module: str
    source: str
    num_bytes: int
    forward_number: int


class KeptGraphs:
    """Models in evaluation mode that record a graph nobody goes backward through."""

    def __init__(self) -> None:
        self._open: list[Candidate] = []
        self._found: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, candidate: Candidate) -> None:
        """A pass whose output has a graph."""
        self._open.append(candidate)

    def backward(self, forward_number: int) -> None:
        """It was for a gradient after all."""
        self._open = [c for c in self._open if c.forward_number != forward_number]

    def settle(self, forward_number: int) -> None:
        """Passes before this one had their chance."""
        for candidate in [c for c in self._open if c.forward_number < forward_number]:
            key = candidate.module, candidate.source
            count, num_bytes = self._found.get(key, (0, 0))
            self._found[key] = count + 1, max(num_bytes, candidate.num_bytes)
            self._open.remove(candidate)

    def findings(self, *, sized: bool) -> Iterator[MemoryFinding]:
        """Args:
        sized: whether bytes are known; without them every such pass counts.
        """
        for (module, source), (count, num_bytes) in list(self._found.items()):
            if sized and num_bytes < MIN_GRAPH_BYTES:
                continue
            held = f"kept {format_bytes(num_bytes)} of activations a pass" if sized else "kept its activations"
            yield MemoryFinding(
                check="watch.eval-keeps-graph",
                module=module,
                source=source,
                num_bytes=num_bytes,
                what=f"{module} ran in eval() with gradients on and {held} for a backward that never came "
                f"({count} time{'s' if count > 1 else ''})",
                why="eval() switches dropout off; it does not stop autograd, which keeps what backward would need for "
                "as long as an output lives",
                fix="with torch.no_grad(): (or torch.inference_mode()) around the evaluation",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What is known when the user's variables are looked through."""

    module: str
    """The model that was called last."""
    evaluating: bool
    grown_bytes: int
    """By which allocated memory has grown since the first round."""
    owns: Callable[[torch.Tensor], bool]
    """Whether a tensor lies in the memory that is watched."""
    origin: Callable[[torch.Tensor], StorageOrigin | None]
    """Where a tensor comes from, where that was recorded."""
    on_host: bool = False
    """Whether that memory is the host's, where tensors that are kept belong."""


class GrowingContainers:
    """Containers of the user's code into which tensors go, round after round, and sums with their graphs."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int]] = {}
        self._found: dict[tuple[str, str], MemoryFinding] = {}
        self._sums: dict[str, tuple[int, int]] = {}
        self._filled_evaluating: dict[str, bool] = {}
        self._last_evaluating: bool | None = None

    def look(self, frame: FrameType, look: Look) -> None:
        """Look through the variables of the user's frames."""
        graphs: list[tuple[FrameType, str, Any]] = []
        seen: set[int] = set()
        piled = 0
        for user in islice(user_frames(frame), MAX_FRAMES):
            for name, value in variables(user):
                if id(value) in seen:
                    continue  # the same one under another name
                seen.add(id(value))
                kind = type(value)
                if issubclass(kind, torch.Tensor):
                    if value.numel() == 1 and value.grad_fn is not None and _is_sum(value):
                        graphs.append((user, name, value))
                elif issubclass(kind, (*CONTAINERS, dict)) and self._grows(value):
                    kept = _last_tensors(value, look)
                    if kept and all(t.grad_fn is not None for t in kept):
                        graphs.append((user, name, value))
                    elif kept and not look.on_host:
                        piled += self._pile(user, name, value, kept[0], self._when_filled(name, look))
        for user, name, value in graphs:
            filled = self._when_filled(name, look, grown=self._is_new(name, value))
            self._keep(_graphs_kept(place_of(user, name), name, value, max(look.grown_bytes - piled, 0), filled), name)
        self._last_evaluating = look.evaluating

    def findings(self) -> Iterator[MemoryFinding]:
        yield from list(self._found.values())

    def _grows(self, value: Any) -> bool:
        """Whether a container has grown since the last look, and before; looks of an evaluation lie in between."""
        size = len(value)
        before, times = self._sizes.get(id(value), (0, 0))
        self._sizes[id(value)] = size, times + (size > before) if size >= before else 0
        return size >= PILE and size > before and times >= 1

    def _is_new(self, name: str, value: Any) -> bool:
        """Whether a sum is another than at the last look; containers that have not grown do not come so far."""
        if not isinstance(value, torch.Tensor):
            return True
        known, self._sums[name] = self._sums.get(name), (id(value), value._version)
        return known != self._sums[name]

    def _when_filled(self, name: str, look: Look, *, grown: bool = True) -> Look:
        """The same look, as of the time when something went into `name`.

        The first look of an evaluation sees what the training before it has left, and the other way round.
        """
        if grown and self._last_evaluating in (None, look.evaluating):
            evaluating = look.evaluating
        else:
            before = look.evaluating if self._last_evaluating is None else self._last_evaluating
            evaluating = self._filled_evaluating.get(name, before)
        self._filled_evaluating[name] = evaluating
        return replace(look, evaluating=evaluating)

    def _pile(self, frame: FrameType, name: str, value: Any, last: torch.Tensor, look: Look) -> int:
        num_bytes = _storage_bytes(value)
        if num_bytes < MIN_PILE_BYTES:
            return num_bytes
        origin = look.origin(last)
        made = f", made by {origin.operator} at {origin.source}" if origin is not None else ""
        found = MemoryFinding(
            check="watch.tensors-pile-up",
            module=origin.module if origin is not None and origin.module else look.module,
            source=place_of(frame, name),
            num_bytes=num_bytes,
            what=f"`{name}` holds {len(value)} tensors on the device, {format_bytes(num_bytes)}, more with every "
            f"step{made}",
            why="what a step leaves behind is memory that the longest batch will miss",
            fix=f"keep numbers (.item()) or host copies (.cpu()) in `{name}`, or clear it",
        )
        if look.evaluating:
            found = replace(
                found,
                check="watch.outputs-pile-up",
                what=f"`{name}` holds {len(value)} outputs on the device, {format_bytes(num_bytes)}, more with every "
                f"batch{made}",
                why="evaluation then needs more memory the longer it runs, and fails near its end",
                fix=f"{name}.append(output.cpu()), or the metric batch by batch; with Trainer: "
                "eval_accumulation_steps=1 and preprocess_logits_for_metrics",
            )
        self._keep(found, name)
        return num_bytes

    def _keep(self, finding: MemoryFinding, name: str) -> None:
        known = self._found.get((finding.check, name))
        if known is None or finding.num_bytes >= known.num_bytes:
            self._found[finding.check, name] = finding


def place_of(frame: FrameType, name: str) -> str:
    return line_that_fills(frame, name) or place(frame.f_code.co_filename, frame.f_lineno)


def _last_tensors(value: Any, look: Look) -> list[torch.Tensor]:
    """The tensors that came last, newest first, if tensors are what goes in."""
    last = islice(reversed(value.values() if isinstance(value, dict) else value), PILE)
    tensors = [next(tensors_in(item), None) for item in last]
    kept = [t for t in tensors if t is not None and not isinstance(t, torch.nn.Parameter) and look.owns(t)]
    return kept if len(kept) == PILE else []


def _is_sum(value: torch.Tensor) -> bool:
    """Losses added to each other, over several steps: additions all the way down."""
    node: Any = value.grad_fn
    for _ in range(SUM_DEPTH):
        if node is None or not type(node).__name__.startswith("AddBackward"):
            return False
        node = node.next_functions[0][0]
    return True


def _storage_bytes(value: Any) -> int:
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(value, depth=3)}
    return sum(sizes.values())


def _graphs_kept(source: str, name: str, value: Any, grown: int, look: Look) -> MemoryFinding:
    held = f"; memory has grown by {format_bytes(grown)} meanwhile" if grown >= MIN_GRAPH_BYTES else ""
    summed = isinstance(value, torch.Tensor)
    how = "adds up losses with their graphs" if summed else f"holds {len(value)} tensors with their graphs"
    fix = f"{name} += loss.item() (or loss.detach())" if summed else f"{name}.append(loss.item()), or loss.detach()"
    if look.evaluating:
        fix = f"torch.no_grad() around the evaluation, and .cpu() on what goes into `{name}`"
    return MemoryFinding(
        check="watch.graphs-kept",
        module=look.module,
        source=source,
        num_bytes=_storage_bytes(value) + grown,
        what=f"`{name}` {how}, more with every {'batch' if look.evaluating else 'step'}{held}",
        why="a loss or an output that is kept keeps the graph behind it, and with it whatever backward has not freed",
        fix=fix,
    )
