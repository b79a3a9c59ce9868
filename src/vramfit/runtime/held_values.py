"""Values that passes may change, held as they were: tensors, names and items, random generators, arrays."""

import pickle
import random
import sys
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from vramfit.errors import WorkloadError

MAX_STILL_BYTES = 16 * 2**20
"""A larger tensor keeps its copy only if the first window changed it."""
PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type})
"""Types of values that cannot change themselves."""
OF_A_PASS: Any = object()
"""Stands for a tensor with a graph: the result of a pass, which the next one makes anew, and no state."""
ABSENT: Any = object()


class HeldTensor:
    """A tensor that passes may change, by its content; held weakly, so that one that a pass replaces is freed as ever.

    Whether a tensor has changed since it was copied, its version says. Versions miss what is written behind autograd's
    back (`.data`, replayed graphs): so the first window compares contents, and what it changed is copied at every one.
    """

    def __init__(self, tensor: torch.Tensor, path: str, *, moves: bool = False) -> None:
        self.path = path
        self.moves = moves
        """Whether passes are known to change it."""
        self._ref = TensorWeakRef(tensor)
        self._device = tensor.device
        is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        self._can_copy = is_known and tensor.device.type != "meta"
        self._is_copied = True
        self._copy: torch.Tensor | None = None
        self._is_new = False
        """Whether the copy is of this window, and not of one before since when nothing seems to have changed."""
        self._version = _version(tensor)

    def tensor(self) -> torch.Tensor | None:
        """None where it is gone."""
        found: torch.Tensor | None = self._ref()
        return found

    @property
    def is_there(self) -> bool:
        """Whether it was not replaced and freed."""
        return self.tensor() is not None

    @property
    def has_copy(self) -> bool:
        """Whether its content can be put back."""
        return self._copy is not None

    def keep(self) -> None:
        """Hold it as it is; no copy is made of one that is as it was copied."""
        tensor = self.tensor()
        if tensor is None:
            return
        version = _version(tensor)
        is_known = self._copy is not None and version == self._version and not self.moves
        self._is_new = not is_known and self._can_copy and (self._is_copied or self.moves)
        if self._is_new:
            self._copy = self._to_host(tensor)
        self._version = version

    def has_moved(self) -> bool:
        """Whether it was changed in place, as its version says."""
        tensor = self.tensor()
        return tensor is not None and _version(tensor) != self._version

    def differs(self, from_it: torch.Tensor | None = None) -> bool:
        """Whether the content is another one than was copied, or another tensor of the same shape has another."""
        tensor = self.tensor() if from_it is None else from_it
        if tensor is None or self._copy is None or (tensor.shape, tensor.dtype) != (self._copy.shape, self._copy.dtype):
            return False
        return not torch.equal(_bits(tensor), _bits(self._copy))

    def learn(self) -> None:
        """The first window is over: what it changed moves, and a large tensor that stayed needs no copy."""
        self.moves = self.moves or (self.has_moved() if self._copy is None else self.differs())
        tensor = self.tensor()
        if not self.moves and tensor is not None and tensor.nbytes > MAX_STILL_BYTES:
            self._copy, self._is_copied = None, False

    def put_back(self) -> torch.Tensor:
        """The tensor with the content it had.

        Raises:
            WorkloadError: it has changed, and what it was is not known.
        """
        tensor = self.tensor()
        has_changed = tensor is None or self.moves or self.has_moved()
        if self._copy is None and has_changed:
            raise lost(self.path, "and no pass before had, so that there is no copy of so large a tensor")
        if not has_changed and self.differs():
            if not self._is_new:
                why = "out of PyTorch's sight (through .data, or by a kernel of its own), as none before"
                raise lost(self.path, why)
            has_changed = True
        if tensor is None:
            assert self._copy is not None
            tensor = self._copy.to(self._device, copy=True)
            self._ref = TensorWeakRef(tensor)
        elif has_changed and self._copy is not None:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(self._copy)
        self._version = _version(tensor)
        return tensor

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy; of what changes at every window, one that the host does not wait for."""
        source = tensor.detach()
        if source.device.type == "cpu":
            return source.clone()
        if source.device.type != "cuda" or not self.moves:
            return source.cpu()
        copy = self._copy
        if copy is None or not copy.is_pinned():
            copy = torch.empty_like(source, device="cpu", pin_memory=True)
        return copy.copy_(source, non_blocking=True)


Tensors = dict[int, HeldTensor]
"""By the id of each tensor."""


class HeldEntries:
    """What the names of an object, the keys of a dict, or the places of a list, a deque or a set stand for.

    Args:
        tensors: those that are held.
        skipped: names that are no state of the model.
        is_of_hook: whether a hook holds it.
    """

    def __init__(
        self, live: Any, path: str, tensors: Tensors, skipped: frozenset[str] = frozenset(), *, is_of_hook: bool = False
    ) -> None:
        self.is_of_hook = is_of_hook
        self.has_names = isinstance(live, dict)
        self._live, self._path, self._skipped = live, path, skipped
        entries = live.items() if self.has_names else enumerate(live)
        self._note(
            {
                name: OF_A_PASS if is_of_a_pass(value) else held_tensor(tensors, value) or value
                for name, value in entries
            }
        )

    def _note(self, kept: dict[Any, Any]) -> None:
        self._kept = kept
        self._is_simple = not any(type(value) is HeldTensor or value is OF_A_PASS for value in kept.values())

    def is_same(self) -> bool:
        """Whether all entries are what they were."""
        live, kept = self._live.values() if self.has_names else self._live, self._kept
        return len(live) == len(kept) and all(map(is_ if self._is_simple else _stands, live, kept.values()))

    def renew(self, hold: Callable[[torch.Tensor, str], HeldTensor]) -> bool:
        """Hold entries as they are now; False where one of them is new and has to be looked through.

        Args:
            hold: gives what holds a tensor at a path.
        """
        kept = {}
        for name, value in self._live.items() if self.has_names else enumerate(self._live):
            was = self._kept.get(name, ABSENT)
            if type(value) in PLAIN or name in self._skipped:
                kept[name] = value
            elif _stands(value, was):
                kept[name] = was
            elif is_of_a_pass(value):
                kept[name] = OF_A_PASS
            elif type(value) is torch.Tensor:
                kept[name] = hold(value, join(self._path, name))
            else:
                return False
        self._note(kept)
        return True

    def moved(self) -> Iterable[str]:
        """Names that stand for another number, or for another tensor of the same shape; a list whose items changed."""
        if not self.has_names:
            yield from () if self.is_same() else (self._path,)
            return
        for name, kept in self._kept.items():
            now = self._live.get(name, ABSENT)
            if name not in self._skipped and not _stands(now, kept) and _is_another(now, kept):
                yield join(self._path, name)

    def put_back(self) -> None:
        """Let entries be what they were."""
        was_same = self.has_names or self.is_same()
        kept = {
            name: value.put_back() if type(value) is HeldTensor else value
            for name, value in self._kept.items()
            if name not in self._skipped and value is not OF_A_PASS
        }
        if not was_same:
            self._live.clear()
            (self._live.update if isinstance(self._live, set) else self._live.extend)(kept.values())
        if not self.has_names:
            return
        for name, value in kept.items():
            if self._live.get(name, ABSENT) is not value:
                self._live[name] = value
        for name in [name for name in self._live if name not in self._kept and name not in self._skipped]:
            del self._live[name]


class HeldValue:
    """What is read and written as a whole: a random generator, a numpy array."""

    def __init__(
        self, path: str, read: Callable[[], Any], write: Callable[[Any], Any], *, is_generator: bool = True
    ) -> None:
        self.path = path
        self.is_generator = is_generator
        self._read, self._write = read, write
        self._kept = b""

    def keep(self) -> None:
        """Hold it as it is."""
        self._kept = pickle.dumps(self._read())

    def has_moved(self) -> bool:
        """Whether it has another value."""
        return pickle.dumps(self._read()) != self._kept

    def put_back(self) -> None:
        """Give it the value that it had."""
        self._write(pickle.loads(self._kept))


class HeldCount(HeldValue):
    """The number of items of a container that is too large to be put back; one that passes change is refused."""

    def __init__(self, container: Any, path: str) -> None:
        super().__init__(path, lambda: len(container), lambda count: None)

    def has_moved(self) -> bool:
        """Never; raises WorkloadError where it has."""
        if not super().has_moved():
            return False
        count = pickle.loads(self._kept)
        what = f"a forward pass changes {self.path}, which has {count:,} items"
        raise WorkloadError(
            [f"{what}: too many to be put back when memory runs out"],
            hint=f"keep {self.path} outside of the model, or as a tensor in a buffer",
        )

    def put_back(self) -> None:
        """Refuse one that has changed."""
        self.has_moved()


def is_of_a_pass(value: Any) -> bool:
    """Whether a value is the result of a pass: a tensor with a graph, or a container of such."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    if isinstance(value, list | tuple | dict):
        parts = value.values() if isinstance(value, dict) else value
        return any(isinstance(part, torch.Tensor) and part.grad_fn is not None for part in parts)
    return False


def held_tensor(tensors: Tensors, value: Any) -> HeldTensor | None:
    """What holds a tensor; None for one that is not held, and for any other value."""
    held = tensors.get(id(value))
    return held if held is not None and held.tensor() is value else None


def held_value(value: Any, path: str) -> HeldValue | None:
    """What holds a generator or an array; None for anything else."""
    if isinstance(value, torch.Generator):
        return HeldValue(path, lambda: bytes(value.get_state().numpy()), lambda kept: _turn_back(value, kept))
    if isinstance(value, random.Random):
        return HeldValue(path, value.getstate, value.setstate)
    np = sys.modules.get("numpy")
    if np is None:
        return None
    if isinstance(value, np.random.RandomState):
        return HeldValue(path, value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        source = value.bit_generator
        return HeldValue(path, lambda: source.state, lambda kept: setattr(source, "state", kept))
    if isinstance(value, np.ndarray) and value.flags.writeable and value.nbytes <= MAX_STILL_BYTES:
        return HeldValue(path, lambda: value, lambda kept: np.copyto(value, kept), is_generator=False)
    return None


def join(path: str, name: Any) -> str:
    """The path of a name below a path."""
    return f"{path}.{name}" if path else str(name)


def lost(path: str, why: str) -> WorkloadError:
    """What to raise where something cannot be put back."""
    return WorkloadError(
        [f"memory ran out, and what failed cannot be done again: a forward pass had changed {path}, {why}"],
        hint=f"keep {path} in a buffer that every pass changes, or change it outside of forward",
    )


def _turn_back(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor on the host: a NaN is equal to itself."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _stands(now: Any, kept: Any) -> bool:
    """Whether a value is the one that was kept."""
    if kept is OF_A_PASS:
        return is_of_a_pass(now)
    return now is (kept.tensor() if type(kept) is HeldTensor else kept)


def _is_another(now: Any, kept: Any) -> bool:
    """Whether a value is of the kind that was kept, and another: not what a first pass puts there for later ones."""
    if type(kept) is HeldTensor:
        return isinstance(now, torch.Tensor) and not is_of_a_pass(now) and kept.differs(now)
    return type(kept) in (int, float) and type(now) in (int, float) and now != kept
