"""What recovery needs: out-of-memory errors recognised, memory freed, and random generators put back."""

import gc
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

MESSAGES = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "Triton Error [CUDA]: out of memory",
    "NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)\nLast error:\nCuda failure 2",
)
"""What libraries below PyTorch say; PyTorch itself has a type for it."""
CUDA_ERROR_MEMORY_ALLOCATION = 2
"""cudaErrorMemoryAllocation (driver_types.h), as `torch.AcceleratorError` carries it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the GPU's memory ran out: by type, by code, by the libraries' own names."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if getattr(error, "error_code", None) == CUDA_ERROR_MEMORY_ALLOCATION:
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def free_memory() -> None:
    """Collect what failed tensors left behind and give cached segments back.

    To be called after the `except` block has ended: inside it, the traceback still holds the failed tensors.
    """
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators of torch, Python and numpy, at one moment."""

    host: torch.Tensor
    devices: tuple[Any, ...]
    python: Any
    numpy: Any

    @staticmethod
    def now() -> "RandomState":
        """The state before a window."""
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        numpy = sys.modules.get("numpy")
        return RandomState(
            host=torch.get_rng_state(),
            devices=tuple(devices),
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
        )

    def restore(self) -> None:
        """Turn the generators back."""
        torch.set_rng_state(self.host)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
