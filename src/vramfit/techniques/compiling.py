"""Compiling: the layers of the encoder as fused kernels, for any number of tokens."""

import os
import shutil
import sys
from typing import Any

import torch

from vramfit.models.anatomy import encoder_layers
from vramfit.settings import TRITON_CAPABILITY
from vramfit.techniques.packing import attention as packed_attention

CPU_COMPILERS = ("g++", "clang++", "c++")


def apply(model: torch.nn.Module, *, backend: Any = "inductor") -> None:
    """Compile every layer when it first runs, in place.

    Layers are alike, so that one compilation serves them all; and sizes stay open, so that no batch asks for another.
    What comes before and after the layers is left as it is: it takes little time, and looks at each batch's lengths.

    Numbers such as dropout's share are taken as they are: with sizes left open, torch would leave them open too, and
    find out in a first try at compiling that it cannot. And the processes that compile kernels start now, beside what
    comes before the first pass.

    Args:
        backend: of `torch.compile`.
    """
    import torch._dynamo

    packed_attention.tell_compiler()
    if backend == "inductor" and next(model.parameters()).is_cuda:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.use_process_pool()  # type: ignore[no-untyped-call]  # asks whether they are there, without waiting
    for layer in encoder_layers(model):
        layer.compile(dynamic=True, backend=backend)
        with_numbers = torch._dynamo.config.patch(specialize_float=True)
        layer._compiled_call_impl = with_numbers(layer._compiled_call_impl)


def undo(model: torch.nn.Module) -> None:
    """Let the layers run as they were."""
    for layer in encoder_layers(model):
        layer._compiled_call_impl = None


def is_applied(model: torch.nn.Module) -> bool:
    """Whether a model's layers are compiled, or will be when they first run."""
    return any(layer._compiled_call_impl is not None for layer in encoder_layers(model))


def why_not(device: torch.device) -> str | None:
    """Why nothing can be compiled for a device here; None where it can."""
    if device.type == "cuda":
        return why_no_triton(device)
    found = os.environ.get("CXX") or any(map(shutil.which, CPU_COMPILERS))
    return None if found else "there is no C++ compiler here"


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton makes no kernels for a GPU; None where it does."""
    from torch.utils._triton import has_triton_package

    if not has_triton_package():
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= TRITON_CAPABILITY else f"Triton does not compile for sm_{major}{minor}"


def has_failed(error: BaseException) -> bool:
    """Whether an error says that compiling failed, and not what was compiled."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled
        return False
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)
