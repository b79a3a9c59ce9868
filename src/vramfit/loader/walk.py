"""Every place of a model that holds a tensor, in the order in which a model comes to its device."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


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
