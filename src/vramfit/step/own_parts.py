"""Tensors that are sharded over processes: a process's own part, and the whole."""

from typing import Any

import torch


def local(tensor: Any) -> torch.Tensor:
    """A process's own part of a tensor; one that is not sharded is its own part."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def full(tensor: Any) -> torch.Tensor:
    """A tensor as a whole; for one that is sharded, all processes must ask."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
