"""Tensors that passes may change, held as they were.

Copies lie in host memory, so that nothing is added to the peak of a device. A tensor is held weakly: one that a pass
replaces is freed as ever, and made again from its copy.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from vramfit.errors import WorkloadError

MAX_STILL_BYTES = 16 * 2**20
"""A tensor larger than this keeps its copy only if the first window changed it."""
PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type})
"""Values that cannot change themselves."""
OF_A_PASS: Any = object()
"""In the place of what has a graph: the result of a pass, which the next one makes anew, and no state."""
ABSENT: Any = object()
"""Where there is nothing to keep."""


def is_of_a_pass(value: Any) -> bool:
    """Whether a value is the result of a pass: a tensor with a graph, or a container of such."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    if isinstance(value, list | tuple | dict):
        parts = value.values() if isinstance(value, dict) else value
        return any(isinstance(part, torch.Tensor) and part.grad_fn is not None for part in parts)
    return False


class HeldTensor:
    """A buffer or another tensor of a module, by its content.

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

    def settle(self) -> None:
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
                raise lost(
                    self.path, "out of PyTorch's sight (through .data, or by a kernel of its own), as none before"
                )
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


class HeldTensors:
    """The tensors of a model, each held once.

    Args:
        moving: paths of those that passes are known to change.
    """

    def __init__(self, moving: Iterable[str] = ()) -> None:
        self._moving = frozenset(moving)
        self._held: dict[int, HeldTensor] = {}

    def __iter__(self) -> Iterator[HeldTensor]:
        return iter(self._held.values())

    def add(self, tensor: torch.Tensor, path: str, known: "HeldTensors | None" = None) -> HeldTensor:
        """Hold a tensor; one that is known keeps its copy."""
        found = None if known is None else known.of(tensor)
        held = found or HeldTensor(tensor, path, moves=path in self._moving)
        self._held[id(tensor)] = held
        return held

    def of(self, tensor: Any) -> HeldTensor | None:
        """What holds a tensor."""
        held = self._held.get(id(tensor))
        return held if held is not None and held.tensor() is tensor else None

    def stand_in(self, value: Any) -> Any:
        """What is kept in the place of a value."""
        return OF_A_PASS if is_of_a_pass(value) else self.of(value) or value

    def made(self, value: Any, path: str) -> Any:
        """As `stand_in`, for a tensor that is new too; ABSENT for what has to be looked through."""
        if type(value) in PLAIN:
            return value
        if is_of_a_pass(value):
            return OF_A_PASS
        return (self.of(value) or self.add(value, path)) if type(value) is torch.Tensor else ABSENT

    def keep(self) -> None:
        """Hold all as they are, and forget those that are gone."""
        self._held = {key: held for key, held in self._held.items() if held.tensor() is not None}
        for held in self:
            held.keep()


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor on the host: a NaN is equal to itself."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def lost(path: str, why: str) -> WorkloadError:
    """What to raise where something cannot be put back."""
    return WorkloadError(
        [f"memory ran out, and what failed cannot be done again: a forward pass had changed {path}, {why}"],
        hint=f"keep {path} in a buffer that every pass changes, or change it outside of forward",
    )
