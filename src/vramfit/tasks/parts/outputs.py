"""How a module is called and how what it gives is read: the loss that it computed, or logits. Nothing else decides."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from vramfit.errors import WorkloadError

Batch = dict[str, torch.Tensor]
CONTRACT = (
    "forward takes the tensors of a batch by name and gives a loss (a tensor with one number, a mapping or an object "
    "with `loss`, or a tuple that begins with it) or logits (a tensor, a mapping or an object with `logits`, or a "
    "tuple that begins with them)"
)
"""What a module of the user's must do; docs/stepper.md says the same at length."""


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss that a model has computed itself; None where it gives none."""
    named = field(output, "loss")
    if isinstance(named, torch.Tensor) and named.numel() == 1:
        return named
    first = output[0] if isinstance(output, list | tuple) and output else output
    return first if isinstance(first, torch.Tensor) and first.dim() == 0 else None


def logits_of(output: Any, name: str = "logits") -> torch.Tensor:
    """The logits in what a model gives.

    Args:
        name: of a head with several, which are always named.

    Raises:
        WorkloadError: there are none.
    """
    named = field(output, name)
    if isinstance(named, torch.Tensor):
        return named
    found = None if name != "logits" else first_tensor(output)
    if found is None:
        raise WorkloadError([f"forward gives {described(output)}, in which there are no {name}"], hint=CONTRACT)
    return found


def first_tensor(output: Any) -> torch.Tensor | None:
    """The first tensor of what a model gives that is more than one number."""
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else [output]
    )
    return next((v for v in values if isinstance(v, torch.Tensor) and v.dim()), None)


def field(output: Any, name: str) -> Any:
    """What an object or a mapping has under a name; None for nothing."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def parameters_of(model: torch.nn.Module) -> Mapping[str, inspect.Parameter] | None:
    """What forward takes by name; None where it takes anything."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return {name: p for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL}


def taken_by(model: torch.nn.Module, batch: Batch) -> Batch:
    """The part of a batch that forward takes."""
    parameters = parameters_of(model)
    return batch if parameters is None else {name: value for name, value in batch.items() if name in parameters}


def described(output: Any) -> str:
    """What a model gives, in words."""
    kind = type(output).__name__
    if isinstance(output, Mapping):
        return f"a {kind} of {', '.join(map(str, output)) or 'nothing'}"
    if isinstance(output, list | tuple):
        return f"a {kind} of {', '.join(type(value).__name__ for value in output) or 'nothing'}"
    return f"a {kind}" if not isinstance(output, torch.Tensor) else f"a tensor of shape {list(output.shape)}"
