"""One rank of several, on paper: what DDP and FSDP2 hold and ask for around a step, in the order in which they do.

The collectives themselves ask for nothing: what they read and write is here. `runtime.distributed` runs the real ones.
"""

from typing import Protocol

import torch

from vramfit.trace.alone import AloneOnPaper
from vramfit.trace.replica import ReplicaOnPaper
from vramfit.trace.shard import ShardOnPaper
from vramfit.trace.tracer import Tracer
from vramfit.workload import Workload


class RankOnPaper(Protocol):
    """What a traced step asks of its rank."""

    learned: list[torch.nn.Parameter]
    """What the optimizer steps."""

    def begin(self) -> None: ...
    def before_pass(self, index: int, num_passes: int) -> None: ...
    def clip(self, max_grad_norm: float | None) -> None: ...
    def size_of(self, parameter: torch.nn.Parameter) -> int: ...


def rank_on_paper(tracer: Tracer, model: torch.nn.Module, workload: Workload) -> RankOnPaper:
    """The rank that a workload's GPU is."""
    if workload.num_gpus == 1:
        return AloneOnPaper(model)
    if workload.parallel == "fsdp":
        return ShardOnPaper(tracer, model, workload.num_gpus)
    return ReplicaOnPaper(tracer, model, workload.num_gpus)
