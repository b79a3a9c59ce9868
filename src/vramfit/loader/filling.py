"""`fill`: a model on the meta device gets its weights, one tensor at a time, each where it is to lie."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from vramfit.errors import CheckpointError
from vramfit.loader.transfer import Transfer
from vramfit.loader.walk import Slot, tensor_slots
from vramfit.techniques.quantization import quantize_rows
from vramfit.workload import Quantize


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
    quantize: Quantize | None = None
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
