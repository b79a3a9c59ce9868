"""What a prediction keeps alive, and what a real model on the CPU does: sums of plain storages, by kind."""

from dataclasses import dataclass
from typing import Any

import torch

from vramfit.cuda.kernels.script import CudaProfile
from vramfit.models.resolve import resolve
from vramfit.records.stream import Stream
from vramfit.runtime.measurement import make_step, prepare
from vramfit.step.plain import make_batch
from vramfit.techniques import optimizers
from vramfit.techniques.quantization import inner_tensors
from vramfit.trace.run import trace
from vramfit.workload import Workload

MODEL = "bert-tiny"
PROFILE = CudaProfile(
    compute_capability=(9, 0), num_multiprocessors=132, max_threads_per_multiprocessor=2048, torch_version=(2, 11)
)
BEFORE_THE_STEP = [("load", "load"), ("inputs", None), ("first.micro0", "first_step")]
AFTER_THE_STEP = [*BEFORE_THE_STEP, ("first.optimizer", None)]
WORKSPACES = ("cublas_workspace", "cublaslt_workspace")


@dataclass(frozen=True)
class LiveBytes:
    """Requested bytes that stay."""

    weights: int
    gradients: int
    state: int


def predicted(**keywords: Any) -> LiveBytes:
    """From the traced stream: what lives when backward has ended, and when the optimizer has stepped."""
    workload = Workload(model=MODEL, batch=4, seq=16, **keywords)
    template = trace(resolve(MODEL), workload, PROFILE)
    before = _live(template.instantiate(4, BEFORE_THE_STEP))
    after = _live(template.instantiate(4, AFTER_THE_STEP))
    return LiveBytes(before["load"], before.get("backward", 0) + before.get("recompute", 0), after.get("optimizer", 0))


def real(**keywords: Any) -> LiveBytes:
    """From a model on the CPU after the very step: parameters and buffers, gradients, optimizer state."""
    workload = Workload(model=MODEL, batch=4, seq=16, **keywords)
    model = prepare(resolve(MODEL), workload)
    weights = _bytes([*model.parameters(), *model.buffers()])
    made: list[torch.optim.Optimizer] = []
    gradients = 0

    def remember(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        made.append(_make(*args, **kwargs))
        return made[-1]

    def count(optimizer: Any, *_: Any) -> None:
        nonlocal gradients
        gradients = _bytes([p.grad for p in model.parameters() if p.grad is not None])

    _make, optimizers.make = optimizers.make, remember  # type: ignore[assignment]
    try:
        step = make_step(model, workload, make_batch(model, workload.task, "train", workload.mask, 4, 16, "cpu"))
    finally:
        optimizers.make = _make
    (optimizer,) = made
    handle = optimizer.register_step_pre_hook(count)
    step()
    handle.remove()
    states = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    return LiveBytes(weights, gradients, _bytes([v for v in states if isinstance(v, torch.Tensor)]))


def _bytes(tensors: list[Any]) -> int:
    parts = [part for tensor in {id(t): t for t in tensors}.values() for _, part in inner_tensors(tensor)]
    return sum(part.numel() * part.element_size() for part in parts)


def _live(stream: Stream) -> dict[str, int]:
    """Bytes that live at the end of a stream, by the part that asked for them; workspaces left out."""
    requests = [event for event in stream.events if event > 0]
    freed = {-event for event in stream.events if event <= 0}
    live: dict[str, int] = {}
    for index, (size, origin) in enumerate(zip(requests, stream.request_origins, strict=True)):
        asked = stream.origins[origin]
        if index not in freed and asked.operator not in WORKSPACES:
            live[asked.part] = live.get(asked.part, 0) + size
    return live
