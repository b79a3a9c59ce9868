"""The state of a model, found: all that can be reached from its modules without looking into objects of libraries."""

import sys
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from vramfit.runtime.state.names import HeldCount, HeldItems, HeldModules, HeldNames, HeldValue, held_value
from vramfit.runtime.state.tensors import PLAIN, HeldTensors, is_of_a_pass

MAX_ITEMS = 10_000
"""Of a container that is looked through."""
OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Names that every module has: parameters, submodules, hooks, and whether it trains."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
DICTS, LISTS = (dict, OrderedDict, defaultdict, Counter), (list, deque, set)
OTHERS = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
"""What has names but no state of a model's."""
LIBRARIES = frozenset(sys.stdlib_module_names) - {"abc", "typing"} | {
    "accelerate",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "numpy",
    "peft",
    "sentence_transformers",
    "tokenizers",
    "torch",
    "torchao",
    "transformers",
    "triton",
    "vramfit",
}
"""Packages whose objects are not looked into: putting back half of what they know would contradict the rest."""

Holder = HeldNames | HeldItems | HeldCount


class StateSearch:
    """One walk; tensors that are held already are taken over with their copies.

    Args:
        known: tensors held by the walk before.
        moving: paths of what passes change.
        is_first: then what can be neither seen nor put back is warned of.
    """

    def __init__(self, known: HeldTensors, moving: Iterable[str], *, is_first: bool) -> None:
        self.tensors = HeldTensors(moving)
        self.weights: dict[str, torch.nn.Parameter] = {}
        self.values: list[HeldValue] = []
        self.holders: list[Holder] = []
        self._known, self._is_first = known, is_first
        self._seen: set[int] = set()
        self._names: list[tuple[type[HeldNames], dict[Any, Any], str, frozenset[str]]] = []
        self._items: list[tuple[Any, str]] = []
        self._counts: list[HeldCount] = []

    def hold(self) -> None:
        """Hold all names and containers that were found; last, when all tensors are known."""
        names = [kind(live, path, self.tensors, without) for kind, live, path, without in self._names]
        items = [HeldItems(live, path, self.tensors) for live, path in self._items]
        self.holders = [*names, *items, *self._counts]

    def look_at(self, value: Any, path: str = "") -> None:
        """Find all state that can be reached from a value."""
        waiting = [(value, path)]
        while waiting:
            value, path = waiting.pop()
            if type(value) in PLAIN or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, torch.Tensor):
                self._hold(value, path)
            elif isinstance(value, torch.nn.Module):
                waiting += self._inside(value, path)
            elif not is_of_a_pass(value):
                waiting += self._parts(value, path)

    def look_at_call(self, call: Any, path: str) -> None:
        """Find the state of what is called: an object, that of a method, what a function was made with."""
        owner = getattr(call, "__self__", call)
        closure = getattr(owner, "__closure__", None)
        if closure is None:
            self.look_at(owner, path)
        elif id(owner) not in self._seen:
            self._seen.add(id(owner))
            for name, cell in zip(owner.__code__.co_freevars, closure, strict=True):
                with suppress(ValueError):  # it is empty
                    self.look_at_call(cell.cell_contents, f"{path}.{name}")

    def look_beside(self, value: Any) -> None:
        """Find numbers, tensors and plain containers among the names of an object; nothing else of it is looked at."""
        path, own = type(value).__name__, vars(value)
        others = frozenset(name for name, value in own.items() if not _is_flat(value))
        self._names.append((HeldNames, own, path, others))
        for name in own.keys() - others:
            self.look_at(own[name], f"{path}.{name}")
        self.hold()

    def _inside(self, module: torch.nn.Module, path: str) -> Iterator[tuple[Any, str]]:
        own = vars(module)
        self._names.append((HeldNames, own, path, OF_TORCH))
        if own["_buffers"]:
            self._names.append((HeldNames, own["_buffers"], path, frozenset()))
        if own["_modules"]:
            self._names.append((HeldModules, own["_modules"], path, frozenset()))
        if own.get("max_norm") is not None:  # an embedding, which scales its weights down in forward
            self.tensors.add(own["_parameters"]["weight"], _join(path, "weight"), self._known).moves = True
        for hooks in HOOKS:
            for hook in own[hooks].values():
                self.look_at_call(hook, _join(path, "hook"))
        for name, value in own.items():
            if name not in OF_TORCH:
                yield value, _join(path, name)
        for names in ("_parameters", "_buffers", "_modules"):
            for name, value in own[names].items():
                yield value, _join(path, name)

    def _parts(self, value: Any, path: str) -> Iterator[tuple[Any, str]]:
        """What a container or an object holds, itself noted."""
        held = held_value(value, path)
        if held is not None:
            self.values.append(held)
        elif isinstance(value, DICTS + LISTS) and len(value) > MAX_ITEMS:
            self._counts.append(HeldCount(value, path))
        elif type(value) in DICTS:
            self._names.append((HeldNames, value, path, frozenset()))
            yield from ((part, f"{path}[{name!r}]") for name, part in value.items())
        elif type(value) in LISTS or isinstance(value, tuple):
            if not isinstance(value, tuple):
                self._items.append((value, path))
            yield from ((part, f"{path}[{index}]") for index, part in enumerate(value))
        elif isinstance(value, Iterator):
            self._warn_of_iterator(path)
        elif _is_own(value):
            self._names.append((HeldNames, vars(value), path, frozenset()))
            yield from ((part, _join(path, name)) for name, part in vars(value).items())

    def _hold(self, tensor: torch.Tensor, path: str) -> None:
        """Hold a tensor; of weights only plain ones: shards and quantized weights come and go in a pass."""
        if type(tensor) is torch.nn.Parameter:
            if self.tensors.of(tensor) is None and not tensor.is_inference():
                self.weights[path] = tensor
        elif not isinstance(tensor, torch.nn.Parameter) and not is_of_a_pass(tensor):
            self.tensors.add(tensor, path, self._known)

    def _warn_of_iterator(self, path: str) -> None:
        if self._is_first:
            warnings.warn(
                f"{path} is an iterator: what a forward pass takes from it cannot be put back when memory runs out, so "
                "that a window that is done again would go on from there",
                stacklevel=5,
            )


def _is_flat(value: Any) -> bool:
    """Whether a value is plain, a tensor, or a container of plain values."""
    if type(value) in DICTS:
        return all(type(part) in PLAIN for part in value.values())
    if type(value) in LISTS:
        return all(type(part) in PLAIN for part in value)
    return type(value) in PLAIN or type(value) is torch.Tensor


def _is_own(value: Any) -> bool:
    """Whether an object has names, and neither its class nor one that it is made from is of a library."""
    if isinstance(value, OTHERS) or not hasattr(value, "__dict__"):
        return False
    kinds = [kind for kind in type(value).__mro__ if kind is not object]
    is_of_library = any(kind.__module__.partition(".")[0] in LIBRARIES for kind in kinds)
    return isinstance(value, types.SimpleNamespace) or not is_of_library


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
