"""`Work`: what a step does, operator by operator: arithmetic, bytes and launches, before any GPU is chosen."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gemm", "attention", "elementwise", "reduction", "embedding", "copy", "optimizer", "transfer", "none"]
"""What kind of kernel an operator runs; `transfer` brings host memory, `none` runs nothing (a view, a host tensor)."""
Phase = Literal["forward", "backward", "recompute", "optimizer", "compiled"]
"""`recompute`: a forward that backward repeats; `compiled`: a compiled layer, forward or backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """Like calls of one operator in one stretch of a step; figures are of one call."""

    operator: str
    kind: Kind
    phase: Phase
    num_calls: int
    num_launches: int
    """Kernels put in the queue; 0 for views."""
    num_bytes: int
    """Read and written."""
    flops: int = 0
    """Of matrix products and attention; additions and multiplications counted apart."""
    dtype: str = ""
    """Of the operands: float32 | bfloat16 | float16 | …"""
    product: tuple[int, int, int, int] | None = None
    """A matrix product's count, m, n and k."""
    num_tensors: int = 1
    """Tensors in the list that a foreach or fused operator takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A part of a step, up to where it goes on to another part or waits for the device."""

    items: tuple[WorkItem, ...]
    waits: bool = False
    """The program asks for a value at the end of it, and goes on when the device has computed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSegment:
    """Stretches in order, and how often they run."""

    stretches: tuple[Stretch, ...]
    num_repeats: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One steady step."""

    segments: tuple[WorkSegment, ...]
    tf32: bool = False
    """Whether products of float32 may run on TF32 tensor cores."""

    def items(self) -> list[tuple[WorkItem, int]]:
        """Every item, with how often its segment runs."""
        return [(i, s.num_repeats) for s in self.segments for stretch in s.stretches for i in stretch.items]

    @property
    def flops(self) -> int:
        """Of the whole step."""
        return sum(item.flops * item.num_calls * repeats for item, repeats in self.items())

    @property
    def num_bytes(self) -> int:
        """Read and written in the whole step."""
        return sum(item.num_bytes * item.num_calls * repeats for item, repeats in self.items())
