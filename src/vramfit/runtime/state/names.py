"""Names, containers, generators and arrays that passes may change, held as they were."""

import pickle
import random
import sys
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.runtime.state.tensors import (
    ABSENT,
    MAX_STILL_BYTES,
    OF_A_PASS,
    PLAIN,
    HeldTensor,
    HeldTensors,
    is_of_a_pass,
)


class HeldNames:
    """The names of a module or an object, or the entries of a dict.

    Args:
        tensors: those that are held.
        without: names that are no state of the model.
    """

    def __init__(
        self, live: dict[Any, Any], path: str, tensors: HeldTensors, without: frozenset[str] = frozenset()
    ) -> None:
        self.path = path
        self._live, self._without = live, without
        self._note({name: tensors.stand_in(value) for name, value in live.items()})

    def _note(self, kept: dict[Any, Any]) -> None:
        self._kept = kept
        self._is_simple = not any(type(value) is HeldTensor or value is OF_A_PASS for value in kept.values())

    def is_same(self) -> bool:
        """Whether all names stand for what they stood for."""
        live, kept = self._live, self._kept
        return len(live) == len(kept) and all(map(is_ if self._is_simple else _stands, live.values(), kept.values()))

    def renew(self, tensors: HeldTensors) -> bool:
        """Hold the names as they are now; False where they stand for something new that is to be looked through."""
        kept = {}
        for name, value in self._live.items():
            was = self._kept.get(name, ABSENT)
            kept[name] = was if _stands(value, was) else tensors.made(value, _joined(self.path, name))
            if kept[name] is ABSENT and name not in self._without:
                return False
        self._note({name: self._live[name] if value is ABSENT else value for name, value in kept.items()})
        return True

    def moved(self) -> Iterable[str]:
        """Names that stand for another number, or for another tensor of the same shape."""
        for name, kept in self._kept.items():
            now = self._live.get(name, ABSENT)
            if name not in self._without and not _stands(now, kept) and _is_another(now, kept):
                yield _joined(self.path, name)

    def put_back(self) -> None:
        """Let names stand for what they stood for."""
        for name, value in self._kept.items():
            if name not in self._without and value is not OF_A_PASS:
                was = value.put_back() if type(value) is HeldTensor else value
                if self._live.get(name, ABSENT) is not was:
                    self._live[name] = was
        for name in [name for name in self._live if name not in self._kept and name not in self._without]:
            del self._live[name]


class HeldModules(HeldNames):
    """The submodules of a module, which stay whatever happens: where they are others, others are looked at."""

    def renew(self, tensors: HeldTensors) -> bool:
        """They are to be looked through."""
        return False

    def moved(self) -> Iterable[str]:
        """None is state."""
        return ()

    def put_back(self) -> None:
        """They are not put back."""


class HeldItems:
    """The items of a list, a deque or a set."""

    def __init__(self, live: Any, path: str, tensors: HeldTensors) -> None:
        self.path = path
        self._live = live
        self._kept = [tensors.stand_in(value) for value in live]

    def is_same(self) -> bool:
        """Whether it has the same items, in order."""
        return len(self._live) == len(self._kept) and all(map(_stands, self._live, self._kept))

    def renew(self, tensors: HeldTensors) -> bool:
        """Hold the items as they are now; False where they are to be looked through."""
        if any(type(value) not in PLAIN for value in self._live):
            return False
        self._kept = list(self._live)
        return True

    def moved(self) -> Iterable[str]:
        """Its own path, where it is not the same."""
        return () if self.is_same() else (self.path,)

    def put_back(self) -> None:
        """Give it the items that it had."""
        was_same = self.is_same()
        items = [value.put_back() if type(value) is HeldTensor else value for value in self._kept]
        if not was_same:
            self._live.clear()
            (self._live.update if isinstance(self._live, set) else self._live.extend)(items)


class HeldCount:
    """Of a container that is too large to be looked through, how many items it has."""

    def __init__(self, live: Any, path: str) -> None:
        self.path = path
        self._live, self._count = live, len(live)

    def is_same(self) -> bool:
        """Whether it has as many items as it had."""
        return len(self._live) == self._count

    def renew(self, tensors: HeldTensors) -> bool:
        """Hold the number as it is now."""
        self._count = len(self._live)
        return True

    def moved(self) -> Iterable[str]:
        """Refuse one that passes change.

        Raises:
            WorkloadError: they do.
        """
        if self.is_same():
            return ()
        raise WorkloadError(
            [
                f"a forward pass changes {self.path}, which has {self._count:,} items: too many to be put back when "
                "memory runs out"
            ],
            hint=f"keep {self.path} outside of the model, or as a tensor in a buffer",
        )

    def put_back(self) -> None:
        """Refuse one that has changed."""
        self.moved()


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


def _turn_back(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


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
