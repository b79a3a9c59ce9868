"""The budget held: the allocator of a GPU refuses what was not announced."""

import os
import warnings

import torch

from vramfit.errors import BudgetExceeded, WorkloadError
from vramfit.units import format_bytes, parse_bytes

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_expandable_segments(device: torch.device) -> bool:
    """Let segments made from now on grow in place; not where the user has set the allocator up. Says whether it did."""
    if device.type != "cuda" or any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch moves it elsewhere; a user can do nothing about that
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    return True


def enforce(memory: str | int, device: torch.device) -> int:
    """Cap what PyTorch may reserve on a GPU from now on; gives the cap in bytes.

    Elsewhere than on a GPU there is no such allocator, and nothing is done.

    Raises:
        WorkloadError: more than the GPU has.
        BudgetExceeded: the process holds more already.
    """
    num_bytes = parse_bytes(memory, name="memory")
    if device.type != "cuda":
        return num_bytes
    total = torch.cuda.get_device_properties(device).total_memory
    if num_bytes > total:
        raise WorkloadError([f"memory {format_bytes(num_bytes)} is more than the {format_bytes(total)} of {device}"])
    if torch.cuda.memory_reserved(device) > num_bytes:
        torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    if held > num_bytes:
        raise BudgetExceeded(
            f"this process holds {format_bytes(held)} of {device} already, the budget is {format_bytes(num_bytes)}",
            predicted_bytes=num_bytes,
            observed_bytes=held,
            phase="load",
            hint="free what was made before, or give a larger memory",
        )
    # the allocator takes a fraction of the total and rounds down
    torch.cuda.set_per_process_memory_fraction(min(1.0, (num_bytes + 0.5) / total), device)
    return num_bytes
