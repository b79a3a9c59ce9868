"""`Stream`: the ordered requests and frees of a run, with where each request came from."""

from dataclasses import dataclass, field
from typing import Literal

MarkKind = Literal["phase", "driver", "empty_cache"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asks: an operator, in a module, in a part of the run."""

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
