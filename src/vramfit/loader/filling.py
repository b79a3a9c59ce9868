"""A model on the meta device gets its weights, one tensor at a time, each where it is to lie.

What no checkpoint holds, a new head and buffers that are computed, is initialised first, the same for the same seed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vramfit.errors import CheckpointError
from vramfit.loader.transfer import Transfer
from vramfit.techniques.quantization import quantize_rows


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place for a tensor; places that share a tensor are several slots."""

    module: torch.nn.Module
    name: str
    path: str
    """The name in the model's state."""
    tensor: torch.Tensor
    """What it held when the walk came by."""

    @property
    def is_parameter(self) -> bool:
        return self.name in self.module._parameters

    @property
    def is_computed(self) -> bool:
        """A buffer that is never saved: the model works it out."""
        return self.name in self.module._non_persistent_buffers_set

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor in its place, without a copy."""
        if self.is_parameter:
            assert isinstance(tensor, torch.nn.Parameter)
            self.module._parameters[self.name] = tensor
        else:
            self.module._buffers[self.name] = tensor


def tensor_slots(module: torch.nn.Module, path: str = "") -> Iterator[Slot]:
    """Children first, then own parameters and buffers: the order of `Module.to`, and of a prediction."""
    for name, child in module.named_children():
        yield from tensor_slots(child, f"{path}.{name}" if path else name)
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            yield Slot(module, name, f"{path}.{name}" if path else name, tensor)


@torch.no_grad()
def initialise(model: Any, fresh: set[str], seed: int = 0) -> None:
    """Give fresh tensors and computed buffers of a meta model their values, on the host, in the type it was built in.

    It is done as transformers does it after a load: what is marked as loaded is left alone, and the model's own
    `_init_weights` sees to the rest. The program's random state is not touched.

    Args:
        model: on the meta device; what is initialised here is on the host afterwards.
        fresh: names of the parameters and saved buffers to be initialised.
        seed: of the host's generator meanwhile, so that every device and precision gets the same values.
    """
    slots = list(tensor_slots(model))
    wanted = {id(slot.tensor) for slot in slots if slot.path in fresh or slot.is_computed}
    made: dict[int, torch.Tensor] = {}
    settled = {id(module) for module in model.modules()} - _touched(model, wanted)
    for slot in slots:
        key = id(slot.tensor)
        if key not in wanted:
            slot.tensor._is_hf_initialized = True  # type: ignore[attr-defined]
            continue
        if key not in made:
            made[key] = _on_host(slot)
        slot.put(made[key])
    for module in model.modules():
        if id(module) in settled:
            module._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model.initialize_weights()


def _touched(model: torch.nn.Module, wanted: set[int]) -> set[int]:
    """Modules that hold a tensor to be initialised, anywhere below: a parent may draw for its children."""
    touched: set[int] = set()

    def visit(module: torch.nn.Module) -> bool:
        below = [visit(child) for child in module.children()]
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(below) or any(id(tensor) in wanted for tensor in own if tensor is not None):
            touched.add(id(module))
        return id(module) in touched

    visit(model)
    return touched


def _on_host(slot: Slot) -> torch.Tensor:
    empty = torch.empty_like(slot.tensor, device="cpu")
    if slot.is_parameter:
        return torch.nn.Parameter(empty, requires_grad=slot.tensor.requires_grad)
    return empty


@dataclass(slots=True)
class Filling:
    """How a model is filled."""

    tensors: Mapping[str, torch.Tensor]
    """Model name → tensor on the host."""
    dtype: torch.dtype
    """The type of the weights; computed buffers keep their own, as transformers leaves them."""
    transfer: Transfer
    host: Transfer
    """For what stays on the host until its turn."""
    quantize: str | None = None
    quantized: set[int] = field(default_factory=set)
    """Modules whose weight is quantized, by identity."""
    offloaded: set[int] = field(default_factory=set)
    """Modules whose weights stay on the host, by identity."""
    on_tensor: Callable[[str], None] = lambda name: None
    """Called with the name of each checkpoint tensor that has been taken."""

    def fill(self, model: torch.nn.Module) -> None:
        """Put every tensor in its place; shared ones come once.

        Raises:
            CheckpointError: a tensor that is neither in the checkpoint nor initialised.
        """
        slots = list(tensor_slots(model))
        names: dict[int, list[str]] = {}
        for slot in slots:
            names.setdefault(id(slot.tensor), []).append(slot.path)
        placed: dict[int, tuple[torch.Tensor, str | None]] = {}
        for slot in slots:
            found = placed.get(id(slot.tensor))
            if found is None or self._differs(slot.path, found[1]):
                source = slot.path if found is not None else self._source(names[id(slot.tensor)])
                found = (self._bring(slot, source), source)
                placed.setdefault(id(slot.tensor), found)
            slot.put(found[0])

    def _source(self, names: list[str]) -> str | None:
        """The name under which a shared tensor is in the checkpoint; None where it is not."""
        return next((name for name in names if name in self.tensors), None)

    def _differs(self, path: str, source: str | None) -> bool:
        """Whether the checkpoint has another tensor of its own for a place that the model shares with another."""
        if source is None or path == source or path not in self.tensors:
            return False
        return not torch.equal(self.tensors[path], self.tensors[source])

    def _bring(self, slot: Slot, source: str | None) -> torch.Tensor:
        if source is None and slot.tensor.device.type == "meta":
            raise CheckpointError(f"{slot.path} is neither in the checkpoint nor initialised", tensor=slot.path)
        on_host = slot.tensor.detach() if source is None else self.tensors[source]
        made = self._convert(slot, on_host)
        if source is not None:
            self.on_tensor(source)
        return made

    def _convert(self, slot: Slot, on_host: torch.Tensor) -> torch.Tensor:
        stays = id(slot.module) in self.offloaded and slot.is_parameter
        transfer = self.host if stays else self.transfer
        casts = slot.tensor.is_floating_point() and not slot.is_computed
        dtype = self.dtype if casts else slot.tensor.dtype
        if not slot.is_parameter:
            return transfer.bring(on_host, dtype)
        if self.quantize is not None and id(slot.module) in self.quantized and slot.name == "weight":
            return quantize_rows(
                on_host, self.quantize, dtype, transfer.device, lambda rows: transfer.bring(rows, dtype)
            )
        return torch.nn.Parameter(transfer.bring(on_host, dtype), requires_grad=slot.tensor.requires_grad)


def empty(model: torch.nn.Module) -> None:
    """Take every tensor out of a model, so that whoever still holds it holds no memory."""
    for slot in tensor_slots(model):
        slot.module._parameters.pop(slot.name, None)
        slot.module._buffers.pop(slot.name, None)
