"""A few operators under the tracer, and what they asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.cuda.kernels.script import CudaProfile
from vramfit.records.stream import Stream
from vramfit.trace.run import tracing
from vramfit.workload import Workload

H200 = CudaProfile(
    compute_capability=(9, 0), num_multiprocessors=132, max_threads_per_multiprocessor=2048, torch_version=(2, 11)
)


@dataclass(frozen=True)
class Asked:
    """One request: who asked, in which module and part, for how much, and whether it was given back."""

    operator: str
    module: str
    part: str
    size: int
    freed: bool


def asked(stream: Stream) -> list[Asked]:
    """Every request of a stream, in order."""
    sizes = [event for event in stream.events if event > 0]
    freed = {-event for event in stream.events if event <= 0}
    origins = [stream.origins[i] for i in stream.request_origins]
    return [
        Asked(o.operator, o.module, o.part, size, i in freed)
        for i, (o, size) in enumerate(zip(origins, sizes, strict=True))
    ]


def record(
    action: Callable[[Callable[[str], None]], Any], model: torch.nn.Module | None = None, **keywords: Any
) -> Stream:
    """The stream of an action on meta tensors; it may say in which part of a step it is, and what it returns stays."""
    model = model or torch.nn.Identity()
    with tracing(model, Workload(model="m", **keywords), H200, probe=None) as session:
        session.tracer.begin("run", "forward")
        kept = action(lambda part: session.tracer.begin("run", part))
        session.tracer.begin("end", "end")
        del kept
    return session.tracer.template.instantiate(1, [("load", "load"), ("run", "run")])


def meta(*shape: int, dtype: torch.dtype = torch.float32, learns: bool = False) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=learns)


class Small(torch.nn.Module):
    """An embedding and a dense block around whatever a test wants to do between them."""

    def __init__(self, between: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(100, 32)
        self.between = between or torch.nn.Identity()
        self.dense = torch.nn.Linear(32, 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.between(self.words(input_ids)))


class Applied(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)
