"""`Ledger`: every storage made while it is watched, leaks from step to step, and the tensors that Python knows."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from vramfit.monitor.places import user_line
from vramfit.records.watch import LiveTensors, MemoryFinding, WatchPhase
from vramfit.units import format_bytes

KEEPS_AFTER = 2
"""Rounds after which a tensor of a step has no business being alive."""
MAX_NODES = 1_000_000
"""Autograd nodes whose modules are remembered."""
LEAKS_FROM = 3
"""Rounds from which tensors of one origin must be alive to be called a leak."""
MIN_BYTES_A_ROUND = 1024


@dataclass(frozen=True, slots=True)
class StorageOrigin:
    """Where a storage comes from."""

    module: str
    operator: str
    source: str
    phase: WatchPhase


@dataclass(frozen=True, slots=True)
class Entry:
    """A storage that is alive."""

    origin: StorageOrigin
    num_bytes: int
    round: int
    device: str
    reference: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Tensors of one origin that stay alive from round to round."""

    origin: StorageOrigin
    num_rounds: int
    num_tensors: int
    num_bytes: int


class Ledger(TorchDispatchMode):
    """Sees every operator; as a mode it costs time on each of them, which is why only the detailed watch has it.

    Args:
        owns: whether a tensor lies in the memory that is watched.
        phase: the phase now.
        on_failure: told of an error that an operator raised, while all is still alive.
    """

    def __init__(
        self,
        owns: Callable[[torch.Tensor], bool],
        phase: Callable[[], WatchPhase],
        on_failure: Callable[[BaseException, str, str], None],
    ) -> None:
        super().__init__()
        self.round = 0
        self.last = StorageOrigin("", "", "", "load")
        """Of the operator that ran last."""
        self.live_bytes = self.peak_bytes = 0
        self._owns = owns
        self._phase = phase
        self._on_failure = on_failure
        self._live: dict[int, Entry] = {}
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._by_sequence: dict[int, str] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "Ledger":
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        for handle in self._handles:
            handle.remove()

    def know(self, model: torch.nn.Module) -> None:
        """Learn the names of a model's modules, and the parameters it had before the watch began."""
        if id(model) in self._names:
            return
        self._names[id(model)] = type(model).__name__
        for name, module in model.named_modules():
            if name:
                self._names[id(module)] = name
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._note(tensor, StorageOrigin(name.rpartition(".")[0], "parameter", "", "load"))

    def keep_only(self, device: str) -> None:
        """Forget what lies on other kinds of devices: another memory is watched from here on."""
        self._live = {key: entry for key, entry in self._live.items() if entry.device == device}
        self._names.clear()
        self.live_bytes = self.peak_bytes = sum(entry.num_bytes for entry in self._live.values())

    def next_round(self) -> None:
        self.round += 1
        self._by_sequence.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a quantized tensor goes first; its plain parts come here
        operator = func.overloadpacket.__name__
        module = self._module()
        self.last = StorageOrigin(module, operator, self.last.source, self._phase())
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:
            self._on_failure(error, operator, module)
            raise
        new = [t for t in _tensors(result) if t.untyped_storage()._cdata not in self._live and self._owns(t)]
        if new:
            self.last = StorageOrigin(module, operator, user_line(), self._phase())
            for tensor in new:
                self._note(tensor, self.last)
        return result

    def alive(self, categories: Mapping[int, str]) -> tuple[LiveTensors, ...]:
        """Everything alive by origin, most first.

        Args:
            categories: storages whose category is known, such as gradients.
        """
        groups: dict[tuple[str, StorageOrigin], list[int]] = defaultdict(list)
        for key, entry in list(self._live.items()):
            category = categories.get(key) or ("activations" if entry.origin.module else "other")
            origin = (
                entry.origin
                if category in ("activations", "other")
                else StorageOrigin(entry.origin.module, "", "", "load")
            )
            groups[category, origin].append(entry.num_bytes)
        made = [
            LiveTensors(
                category=category,
                module=origin.module,
                operator=origin.operator,
                source=origin.source,
                phase=origin.phase if category in ("activations", "other") else "",
                num_tensors=len(sizes),
                num_bytes=sum(sizes),
            )
            for (category, origin), sizes in groups.items()
        ]
        return tuple(sorted(made, key=lambda g: -g.num_bytes))

    def restart_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def origin(self, tensor: torch.Tensor) -> StorageOrigin | None:
        """Where a live tensor comes from; None for one made before the watch."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry.origin if entry is not None else None

    def leaks(self, known: Iterable[int]) -> list[Leak]:
        """Origins that left tensors behind in several rounds that are over; those with a known place are none."""
        skipped = set(known)
        groups: dict[StorageOrigin, list[Entry]] = defaultdict(list)
        for key, entry in list(self._live.items()):
            if entry.round <= self.round - KEEPS_AFTER and entry.origin.phase != "load" and key not in skipped:
                groups[entry.origin].append(entry)
        found = []
        for origin, entries in groups.items():
            rounds = {entry.round for entry in entries}
            if len(rounds) >= LEAKS_FROM:
                num_bytes = sum(entry.num_bytes for entry in entries)
                found.append(Leak(origin=origin, num_rounds=len(rounds), num_tensors=len(entries), num_bytes=num_bytes))
        return sorted(found, key=lambda leak: -leak.num_bytes)

    def _note(self, tensor: torch.Tensor, origin: StorageOrigin) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or not storage.nbytes() or not self._owns(tensor):
            return
        reference = weakref.ref(storage, lambda _: self._gone(key))
        self._live[key] = Entry(origin, storage.nbytes(), self.round, tensor.device.type, reference)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is not None:
            self.live_bytes -= entry.num_bytes

    def _module(self) -> str:
        """The module that runs, or, in backward, that recorded the node that runs."""
        if self._stack:
            name = self._stack[-1]
            if len(self._by_sequence) >= MAX_NODES:  # a program that takes no steps
                self._by_sequence.clear()
            self._by_sequence[torch.autograd._get_sequence_nr()] = name  # type: ignore[attr-defined]
            return name
        node: Any = torch._C._current_autograd_node()
        # the node took its number just before the operator ran, when the next number was one higher
        return self._by_sequence.get(node._sequence_nr() + 1, "") if node is not None else ""

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        self._stack.append(name if name is not None else self._stack[-1] if self._stack else type(module).__name__)

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def leak_findings(leaks: Iterable[Leak]) -> Iterator[tuple[WatchPhase, MemoryFinding]]:
    """One finding a line, with the phase in which most of it was made."""
    by_line: dict[str, list[Leak]] = defaultdict(list)
    for leak in leaks:
        by_line[leak.origin.source].append(leak)
    for source, found in by_line.items():
        num_bytes = sum(leak.num_bytes for leak in found)
        rounds = max(leak.num_rounds for leak in found)
        if num_bytes < MIN_BYTES_A_ROUND * rounds:
            continue
        worst = max(found, key=lambda leak: leak.num_bytes)
        unit = "batch" if worst.origin.phase == "evaluation" else "step"
        finding = MemoryFinding(
            check="watch.leak",
            module=worst.origin.module,
            source=source,
            num_bytes=num_bytes,
            what=f"tensors made by {worst.origin.operator} stay alive from every {unit}: "
            f"{format_bytes(num_bytes // rounds)} a {unit}, {format_bytes(num_bytes)} so far "
            f"({sum(leak.num_tensors for leak in found)} tensors of {rounds})",
            why=_why(worst),
            fix=_fix(worst),
        )
        yield worst.origin.phase, finding


def _why(leak: Leak) -> str:
    if leak.origin.phase in ("forward", "evaluation"):
        return "something holds on to it: a list, an attribute, a closure, or an output whose graph was never freed"
    return "something holds on to it after the step is over"


def _fix(leak: Leak) -> str:
    if leak.origin.phase == "evaluation":
        return "torch.no_grad() around the pass, and .cpu() on what is kept"
    return "keep .item(), .detach().cpu() or nothing of it; clear what collects it after each step"


def categories(models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, str]:
    """Storage → its category, for all that a model or an optimizer keeps."""
    found: dict[int, str] = {}
    for optimizer in optimizers:
        for state in list(optimizer.state.values()):
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    found[_key(value)] = "optimizer"
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            found[_key(tensor)] = "weights"
            if tensor.grad is not None:
                found[_key(tensor.grad)] = "gradients"
    return found


def python_tensors(
    owns: Callable[[torch.Tensor], bool], known: dict[int, str], allocated_bytes: int | None
) -> tuple[LiveTensors, ...]:
    """Live tensors that Python knows, by category and shape; what is allocated beyond them is autograd's."""
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    seen: set[int] = set()
    for value in gc.get_objects():
        if not issubclass(type(value), torch.Tensor) or type(value).__name__ == "FakeTensor":
            continue
        try:
            key = _key(value)
            if key in seen or not value.untyped_storage().nbytes() or not owns(value):
                continue
        except (RuntimeError, NotImplementedError, ReferenceError):  # no storage of its own
            continue
        seen.add(key)
        category = known.get(key, "other")
        shape = "" if category != "other" else f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        sizes[category, shape].append(value.untyped_storage().nbytes())
    groups = [
        LiveTensors(category=category, operator=shape, num_tensors=len(each), num_bytes=sum(each))
        for (category, shape), each in sizes.items()
    ]
    rest = (allocated_bytes or 0) - sum(g.num_bytes for g in groups)
    if rest > 0:
        groups.append(
            LiveTensors(category="activations", operator="kept by autograd for backward", num_tensors=1, num_bytes=rest)
        )
    return tuple(sorted(groups, key=lambda g: -g.num_bytes))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
