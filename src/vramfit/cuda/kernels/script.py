"""The language kernels are described in: a call with concrete shapes in, a script of requests out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vramfit.cuda.profile import CudaProfile


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
