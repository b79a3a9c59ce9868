"""Tensors that are sharded over processes: a process's own part, and the whole."""

from typing import Any

import torch


def local(tensor: Any) -> torch.Tensor:
    """A process's own part of a tensor; one that is not sharded is its own part."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def put_part(into: Any, whole: torch.Tensor) -> None:
    """Write a whole tensor into one that may be sharded: each process takes its part."""
    if hasattr(into, "placements"):
        from torch.distributed.tensor import distribute_tensor

        device = local(into).device
        cut = distribute_tensor(whole.to(device), into.device_mesh, into.placements, src_data_rank=None)
        local(into).copy_(local(cut))
    else:
        into.copy_(whole)


def full(tensor: Any) -> torch.Tensor:
    """A tensor as a whole; for one that is sharded, all processes must ask."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
