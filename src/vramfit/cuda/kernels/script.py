"""The language kernels are described in: a call with concrete shapes and a `CudaProfile` in, a script of requests out.

A `CudaProfile` is what a (torch version, GPU) pair decides: workspaces, kernel choice, whether it was measured.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vramfit.units import MIB

VERIFIED = {
    (tuple(entry["torch"]), tuple(entry["compute_capability"]))
    for entry in json.loads((Path(__file__).parents[1] / "verified.json").read_text(encoding="utf-8"))
}
"""(torch, compute capability) pairs on which predictions were compared with measurement: by this project, or by
receipts. A test holds the file to the folder `receipts` of the repository."""

HOPPER_WORKSPACE_BYTES = 4096 * 8 * 1024
DEFAULT_WORKSPACE_BYTES = 4096 * 2 * 1024 + 16 * 8 * 1024
"""aten/src/ATen/cuda/CublasHandlePool.cpp (2.11), parseChosenWorkspaceSize: 32 MiB on sm_90, else :4096:2:16:8."""
LT_WORKSPACE_BYTES = 1 * MIB
"""aten/src/ATen/cuda/CUDABlas.cpp (2.11), CUBLASLT_WORKSPACE_SIZE's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaProfile:
    """A GPU and a torch release, as far as memory depends on them."""

    compute_capability: tuple[int, int]
    num_multiprocessors: int
    max_threads_per_multiprocessor: int
    torch_version: tuple[int, int]

    @property
    def verified(self) -> bool:
        """Whether this very pair has been measured."""
        return (self.torch_version, self.compute_capability) in VERIFIED

    @property
    def cublas_workspace_bytes(self) -> int:
        """Kept by each thread from its first matrix product on."""
        return HOPPER_WORKSPACE_BYTES if self.compute_capability[0] >= 9 else DEFAULT_WORKSPACE_BYTES

    @property
    def cublaslt_workspace_bytes(self) -> int:
        """Kept by each thread from its first product with a bias on."""
        return LT_WORKSPACE_BYTES

    @property
    def prefers_cudnn_attention(self) -> bool:
        """sdp_utils.cpp (2.11), check_prefer_cudnn_attention: Hopper and data-centre Blackwell."""
        return self.compute_capability in ((9, 0), (10, 0))

    @property
    def has_flash_attention(self) -> bool:
        """sdp_utils.cpp (2.11), check_flash_attention_hardware_support: sm_80 and newer."""
        return self.compute_capability >= (8, 0)

    @property
    def has_efficient_attention(self) -> bool:
        """sdp_utils.cpp (2.11), check_mem_efficient_hardware_support: sm_50 and newer."""
        return self.compute_capability >= (5, 0)

    @property
    def has_bf16(self) -> bool:
        """Native bfloat16 arithmetic."""
        return self.compute_capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as a kernel sees it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def numel(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and s != expected:
                return False
            expected *= n
        return True


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One operator call: arguments with tensors as specs, outputs likewise (None where there is none)."""

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorSpec | None, ...]
    profile: CudaProfile


@dataclass(slots=True)
class Script:
    """Requests of one kernel in order: `("out", i)`, `("temp", j, bytes)`, `("free", j)`."""

    steps: list[tuple[str, int, int]] = field(default_factory=list)
    _num_temps: int = 0

    def out(self, index: int = 0) -> None:
        """The index-th output is requested now."""
        self.steps.append(("out", index, 0))

    def temp(self, num_bytes: int) -> int:
        """A temporary is requested; gives a handle for `free`."""
        handle = self._num_temps
        self._num_temps += 1
        self.steps.append(("temp", handle, num_bytes))
        return handle

    def free(self, *handles: int) -> None:
        """Temporaries are given back, in this order."""
        self.steps.extend(("free", handle, 0) for handle in handles)

    def scratch(self, *sizes: int) -> None:
        """Temporaries requested one after the other, and given back in reverse, as locals of a function are."""
        handles = [self.temp(size) for size in sizes if size]
        self.free(*reversed(handles))


Kernel = Callable[[KernelCall, Script], None]

KERNELS: dict[str, Kernel] = {}
"""Operator name → its description. Operators that are not here ask for their outputs, in order, and no more."""


def kernel(*operators: str) -> Callable[[Kernel], Kernel]:
    """Register a description for these operators."""

    def register(function: Kernel) -> Kernel:
        for operator in operators:
            assert operator not in KERNELS, operator
            KERNELS[operator] = function
        return function

    return register


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def last_power_of_two(n: int) -> int:
    """The largest power of two that is not above n."""
    return 1 << (n.bit_length() - 1) if n > 0 else 1
