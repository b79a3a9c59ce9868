"""`Stream`: the ordered requests and frees of a run, with where each request came from."""

from dataclasses import dataclass, field
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


MarkKind = Literal["phase", "driver", "empty_cache"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from: an operator, in a module, in a part of the run."""

    operator: str
    """The ATen operator, or what stands in its place (`parameter`, `cublas_workspace`)."""
    module: str
    """Path of the module whose forward, or whose gradient, it belongs to."""
    part: str
    """load | inputs | forward | backward | recompute | optimizer."""


@dataclass(frozen=True, slots=True)
class StreamMark:
    """A boundary before the event at `index`: a phase begins, the driver loads a library, or what is cached is given
    back."""

    index: int
    kind: MarkKind
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """What a run asks of the allocator."""

    events: list[int]
    """A positive number requests that many bytes; requests count from 0, and `-k` frees the k-th."""
    request_origins: list[int]
    """For each request, an index into `origins`."""
    origins: list[Origin]
    marks: list[StreamMark]
    parts: list[tuple[int, str]]
    """(index, part): from this event on the run is in this part."""
    request_streams: dict[int, int] = field(default_factory=dict)
    """Request → number of the CUDA stream it is made on, where that is not the default one (0)."""

    @property
    def num_requests(self) -> int:
        return len(self.request_origins)

    def __repr__(self) -> str:
        return f"<Stream of {len(self.events):,} events, {self.num_requests:,} of them requests>"
