"""Inputs of checkpointed layers in host memory: between forward and backward a layer keeps nothing on the device.

Copies go on the stream that computes: they are small beside a layer's work, and a block that is freed there can be used
again at once, so that what is allocated when is known beforehand.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import encoder_layers
from vramfit.techniques.offloading.gradient_slots import out_of_sight

ATTRIBUTE = "_vramfit_inputs"
"""Where a model keeps its `LayerInputs`."""


def apply(model: torch.nn.Module) -> "LayerInputs":
    """Let the inputs of a model's checkpointed layers wait in host memory, in place.

    Raises:
        WorkloadError: no layer is checkpointed.
    """
    layers = [layer for layer in encoder_layers(model) if getattr(layer, "gradient_checkpointing", False)]
    if not layers:
        raise WorkloadError(["offload activations: no layer is checkpointed, so there is no input that could wait"])
    made = LayerInputs(layers)
    model.__dict__[ATTRIBUTE] = made
    return made


def undo(model: torch.nn.Module) -> None:
    """Forget where a model's layers leave their inputs; what checkpoints them is put back by whoever set it."""
    model.__dict__.pop(ATTRIBUTE, None)


def layer_inputs_of(model: torch.nn.Module) -> "LayerInputs | None":
    """Where a model's layers leave their inputs; None where they keep them."""
    found: LayerInputs | None = model.__dict__.get(ATTRIBUTE)
    return found


class LayerInputs:
    """What waits between the forward pass of checkpointed layers and their backward."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        self._sizes: dict[int, int] = {}
        for index, layer in enumerate(layers):
            function: Any = partial(self._checkpoint, index)
            layer._gradient_checkpointing_func = function

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the input of each layer, at most until now."""
        return tuple(self._sizes.values())

    def _checkpoint(self, index: int, layer: Callable[..., Any], hidden: torch.Tensor, *others: Any) -> Any:
        """In place of torch's function: the layer sees its input, and backward a copy that was away."""
        waiting = Waiting(hidden)
        self._sizes[index] = max(hidden.nbytes, self._sizes.get(index, 0))

        def compute(_: torch.Tensor, *others: Any) -> Any:
            return layer(waiting.bring(), *others)

        # torch turns back the random generators of the devices that it sees among the arguments
        output = checkpoint(compute, hidden.new_empty(0), *others, use_reentrant=False)
        waiting.leave()
        return output


class Waiting:
    """A tensor that goes to host memory and comes back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here: torch.Tensor | None = tensor
        self._there: torch.Tensor | None = None
        self._device = tensor.device
        self._learns = tensor.requires_grad

    def leave(self) -> None:
        """From now on it takes nothing of the device's memory."""
        tensor, self._here = self._here, None
        assert tensor is not None
        if self._device.type == "meta":  # a prediction: the copy is counted, and nothing is held
            self._there = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
            tensor.detach().copy_(self._there)
            return
        with out_of_sight(self._device):
            self._there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
            self._there.copy_(tensor.detach(), non_blocking=True)

    def bring(self) -> torch.Tensor:
        """The tensor; a copy of it where it has left."""
        if self._here is not None:
            return self._here
        assert self._there is not None
        made = torch.empty(self._there.shape, dtype=self._there.dtype, device=self._device)
        with out_of_sight(self._device):
            made.copy_(self._there, non_blocking=True)
        return made.requires_grad_(self._learns)
