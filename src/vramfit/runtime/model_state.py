"""`ModelState`: what forward passes change beside gradients, kept before a window and put back where it is done again.

Buffers, numbers, lists, arrays and random generators, in modules and in objects of the user's own that modules hold.
What objects of libraries hold is left alone: they keep account of what is really there. Copies of tensors lie in host
memory, so that nothing is added to the peak of a device.
"""

import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.monitor.places import warn_user
from vramfit.runtime.held_values import (
    PLAIN,
    HeldCount,
    HeldEntries,
    HeldTensor,
    HeldValue,
    Tensors,
    held_tensor,
    held_value,
    is_of_a_pass,
    join,
    lost,
)
from vramfit.step.recovery import RandomState, free_memory, is_out_of_memory

MAX_NAMED = 3
"""Values that a warning names."""
MAX_ITEMS = 10_000
"""Of a container that is looked through."""
OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Names that every module has: parameters, submodules, hooks, and whether it trains."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
DICTS, LISTS = (dict, OrderedDict, defaultdict, Counter), (list, deque, set)
OTHERS = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
"""Objects that have names but no state of a model's."""
PACKAGES = {"accelerate", "bitsandbytes", "datasets", "deepspeed", "numpy", "peft", "sentence_transformers"}
PACKAGES |= {"tokenizers", "torch", "torchao", "transformers", "triton", "vramfit"}
LIBRARIES = frozenset(sys.stdlib_module_names) - {"abc", "typing"} | PACKAGES
"""Packages whose objects are not looked into: putting back half of what they know would contradict the rest."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Failed:
    """A call that ran out of memory; what it had changed in the model is put back."""

    message: str
    """The first line of the error."""


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
        self.is_known = False
        """Whether a window has shown what passes change."""
        self._loss = loss
        self._random: RandomState | None = None
        self._found = _Search({}, ())
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._versions: list[int] = []
        self._beside: _Search | None = None
        self._collected: set[str] = set()
        """Lists that hooks fill: nothing that is computed depends on them."""

    def keep(self, *, beside: Any = None) -> None:
        """Hold everything as it is now.

        Args:
            beside: an object whose own numbers, lists of such and tensors are state too, until `let_go`.
        """
        with _disable_current_modes():
            self._random = RandomState.now()
            if not self._found.is_current():
                self._search()
            self._found.keep()
            self._versions = self._versions_now()
            if beside is not None:
                self._beside = _Search(self._found.tensors, ())
                self._beside.look_beside(beside)
                self._beside.keep()

    def let_go(self) -> None:
        """Forget what was kept beside the model."""
        self._beside = None

    def attempt(
        self,
        call: Callable[[], Result],
        *,
        recovers: Callable[[BaseException], bool] = is_out_of_memory,
        see: Callable[[BaseException], None] = lambda error: None,
        drop: Callable[[], None] = lambda: None,
    ) -> Result | Failed:
        """Make a call of passes; where memory runs out, put back what was kept before it.

        Args:
            recovers: whether an error is of those that are recovered from; any other is raised.
            see: told of such an error while everything that the call had made is still alive.
            drop: lets go of what else the call has left, such as gradients, before memory is freed.
        """
        try:
            return call()
        except BaseException as error:
            if not recovers(error):
                raise
            see(error)
            failed = Failed(str(error).splitlines()[0])
        drop()
        free_memory()
        self.put_back()
        return failed

    def learn(self) -> None:
        """Note what a window that went through has changed: the first one shows what passes change.

        Raises:
            WorkloadError: they change what cannot be put back.
        """
        tensors = self._found.tensors
        for path in self._changed_weights():  # from now on they are copied before a window, as buffers are
            weight = self._weights.pop(path)
            tensors[id(weight)] = HeldTensor(weight, path, moves=True)
        self._versions = self._versions_now()
        if self.is_known:
            for tensor in tensors.values():
                tensor.moves = tensor.moves or tensor.has_moved()
            return
        with _disable_current_modes():
            rebound = [(path, entries) for entries in self._found.entries for path in entries.moved()]
            for tensor in tensors.values():
                tensor.learn()
            values = [value for value in self._found.values if value.has_moved()]
        in_place = [tensor.path for tensor in tensors.values() if tensor.moves]
        self.moving = (*in_place, *(path for path, _ in rebound), *(v.path for v in values if not v.is_generator))
        self.moves_in_python = bool(rebound or values)
        self.is_known = True
        self._collected = {path for path, entries in rebound if entries.is_of_hook and not entries.has_names}

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
            kept = [self._found] if self._beside is None else [self._found, self._beside]
            for entries in (entries for found in kept for entries in found.entries):
                entries.put_back()
            for tensor in self._found.tensors.values():
                if tensor.is_there and (tensor.has_copy or not is_tried_out):
                    tensor.put_back()
            for value in (value for found in kept for value in found.values):
                value.put_back()
            self._random.restore()

    def warn_of_splits(self) -> None:
        """Warn where results depend on how many passes a window has."""
        moving = [path for path in self.moving if path not in self._collected]
        if not moving:
            return
        more = f" and {len(moving) - MAX_NAMED} more" if len(moving) > MAX_NAMED else ""
        warn_user(
            f"every forward pass changes {', '.join(moving[:MAX_NAMED])}{more}: what depends on these values "
            "depends on how many passes a batch is split into, and on checkpointing, in which layers pass twice; a "
            "step that is done again in the same micro-batches is the same to the bit"
        )

    def _changed_weights(self) -> list[str]:
        """Paths of those that were changed in place since they were kept."""
        now = self._versions_now()
        if now == self._versions:
            return []
        return [path for path, new, old in zip(self._weights, now, self._versions, strict=True) if new != old]

    def _versions_now(self) -> list[int]:
        return [weight._version for weight in self._weights.values()]

    def _search(self) -> None:
        """Find the state anew; tensors that are held already keep their copies."""
        search = _Search(self._found.tensors, self.moving, warns=not self._found.entries)
        search.look_at(self.model)
        search.look_at_call(self._loss, "loss_fn")
        search.hold()
        self._found = search
        self._weights = {
            p: weight for p, weight in search.weights.items() if held_tensor(search.tensors, weight) is None
        }


class _Search:
    """All state that can be reached from a model without looking into objects of libraries.

    Args:
        known: tensors held by the search before.
        moving: paths of what passes change.
        warns: of what can be neither seen nor put back.
    """

    def __init__(self, known: Tensors, moving: Iterable[str], *, warns: bool = False) -> None:
        self.tensors: Tensors = {}
        self.weights: dict[str, torch.nn.Parameter] = {}
        self.values: list[HeldValue] = []
        self.entries: list[HeldEntries] = []
        self._submodules: list[HeldEntries] = []
        """They are not put back: where they are others, others are looked at."""
        self._known, self._moving, self._warns = known, frozenset(moving), warns
        self._seen: set[int] = set()
        self._containers: list[tuple[Any, str, frozenset[str], bool]] = []
        self._module_dicts: list[Any] = []
        self._is_in_hook = False
        self._modules_of_hooks: list[tuple[Any, str]] = []

    def hold(self) -> None:
        """Hold all names and items that were found; last, when all tensors are known."""
        self.entries = [
            HeldEntries(live, path, self.tensors, skipped, is_of_hook=of_hook)
            for live, path, skipped, of_hook in self._containers
        ]
        self._submodules = [HeldEntries(live, "", self.tensors) for live in self._module_dicts]

    def is_current(self) -> bool:
        """Whether something is held, and nothing is new that has to be looked through."""
        return (
            bool(self.entries)
            and all(one.is_same() for one in self._submodules)
            and all(one.is_same() or one.renew(self._hold_tensor) for one in self.entries)
        )

    def keep(self) -> None:
        """Hold tensors and values as they are, and forget tensors that are gone."""
        self.tensors = {key: held for key, held in self.tensors.items() if held.is_there}
        held: list[HeldTensor | HeldValue] = [*self.tensors.values(), *self.values]
        for one in held:
            one.keep()

    def look_at(self, value: Any, path: str = "") -> None:
        """Find all state that can be reached from a value."""
        waiting = [(value, path)]
        while waiting:
            value, path = waiting.pop()
            if type(value) in PLAIN or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, torch.Tensor):
                self._add_tensor(value, path)
            elif isinstance(value, torch.nn.Module) and self._is_in_hook:  # it is no hook's, whoever knows it
                self._seen.discard(id(value))
                self._modules_of_hooks.append((value, path))
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
        self._add(own, path, others)
        for name in own.keys() - others:
            self.look_at(own[name], f"{path}.{name}")
        self.hold()

    def _inside(self, module: torch.nn.Module, path: str) -> Iterator[tuple[Any, str]]:
        own = vars(module)
        self._add(own, path, OF_TORCH)
        if own["_buffers"]:
            self._add(own["_buffers"], path)
        if own["_modules"]:
            self._module_dicts.append(own["_modules"])
        if own.get("max_norm") is not None:  # an embedding, which scales its weights down in forward
            self._hold_tensor(own["_parameters"]["weight"], join(path, "weight")).moves = True
        self._is_in_hook = True
        for hooks in HOOKS:
            for hook in own[hooks].values():
                self.look_at_call(hook, join(path, "hook"))
        self._is_in_hook = False
        yield from self._modules_of_hooks
        self._modules_of_hooks = []
        for name, value in own.items():
            if name not in OF_TORCH:
                yield value, join(path, name)
        for names in ("_parameters", "_buffers", "_modules"):
            for name, value in own[names].items():
                yield value, join(path, name)

    def _parts(self, value: Any, path: str) -> Iterator[tuple[Any, str]]:
        """What a container or an object holds, itself noted."""
        held = held_value(value, path)
        if held is not None:
            self.values.append(held)
        elif isinstance(value, DICTS + LISTS) and len(value) > MAX_ITEMS:
            self.values.append(HeldCount(value, path))
        elif type(value) in DICTS:
            self._add(value, path)
            yield from ((part, f"{path}[{name!r}]") for name, part in value.items())
        elif type(value) in LISTS or isinstance(value, tuple):
            if not isinstance(value, tuple):
                self._add(value, path)
            yield from ((part, f"{path}[{index}]") for index, part in enumerate(value))
        elif isinstance(value, Iterator):
            if self._warns:
                warn_user(
                    f"{path} is an iterator: what a forward pass takes from it cannot be put back when memory runs "
                    "out, so that a window that is done again would go on from there"
                )
        elif _is_own(value):
            self._add(vars(value), path)
            yield from ((part, join(path, name)) for name, part in vars(value).items())

    def _add(self, container: Any, path: str, skipped: frozenset[str] = frozenset()) -> None:
        self._containers.append((container, path, skipped, self._is_in_hook))

    def _add_tensor(self, tensor: torch.Tensor, path: str) -> None:
        """Hold a tensor; of weights only plain ones: shards and quantized weights come and go in a pass."""
        if type(tensor) is torch.nn.Parameter:
            if held_tensor(self._known, tensor) is not None:  # a weight that passes change
                self._hold_tensor(tensor, path)
            elif not tensor.is_inference():
                self.weights[path] = tensor
        elif not isinstance(tensor, torch.nn.Parameter) and not is_of_a_pass(tensor):
            self._hold_tensor(tensor, path)

    def _hold_tensor(self, tensor: torch.Tensor, path: str) -> HeldTensor:
        known = held_tensor(self.tensors, tensor) or held_tensor(self._known, tensor)
        held = known or HeldTensor(tensor, path, moves=path in self._moving)
        self.tensors[id(tensor)] = held
        return held


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
