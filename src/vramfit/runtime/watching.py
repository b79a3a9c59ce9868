"""`watch`: live memory of any PyTorch code, on a GPU, on the emulated one, or on the CPU."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from vramfit.emulator.gpu import EmulatedGPU, active_gpu
from vramfit.errors import VramfitError, WorkloadError
from vramfit.monitor.outlets import JsonLines, Outlet, Prometheus
from vramfit.monitor.sources import CudaMemory, HostMemory, MemorySource, Reading, resident_bytes
from vramfit.monitor.watch import Watch
from vramfit.records.watch import WatchRecord
from vramfit.runtime.watch_advice import advise
from vramfit.step.out_of_memory import is_out_of_memory

MIN_INTERVAL_S = 0.05


def watch(
    *,
    detailed: bool = False,
    interval_s: float = 0.5,
    jsonl: str | Path | None = None,
    prometheus: str | Path | None = None,
    on_sample: Callable[[WatchRecord], None] | None = None,
    plan_on_failure: bool = True,
    show_findings: bool = True,
    stream: IO[str] | None = None,
) -> Watch:
    """Watch the memory of what runs inside a `with` block, or of a function it decorates.

    Requested, allocated, reserved and process memory by phase (load, forward, backward, optimizer, evaluation), and
    habits that cost memory, each with module, file:line, bytes and the change that mends it. When memory runs out,
    what was alive is written before the error goes on.

    Args:
        detailed: follow every operator: largest tensors by module, operator and line, leaks from step to step, exact
            peaks by phase. Slower; on CUDA it resets torch's own peak counters at each phase.
        interval_s: seconds between samples, at least 0.05.
        jsonl: a file for every sample and finding, as JSON lines.
        prometheus: a file in Prometheus' text format, replaced at every sample.
        on_sample: called with the record so far after every sample, from a thread.
        plan_on_failure: when memory runs out and the model is recognised, look for settings that fit (under a minute).
        show_findings: say at the end what was found, in plain words; `Watch.findings` has it in any case.
        stream: where words go; standard error, unless given.

    Raises:
        WorkloadError: an interval that is too short.

    >>> model = torch.nn.Linear(8, 8)
    >>> with watch() as w:
    ...     _ = model(torch.ones(2, 8))
    >>> w.record.num_forwards
    1
    """
    if not interval_s >= MIN_INTERVAL_S:
        raise WorkloadError([f"interval_s {interval_s} is below {MIN_INTERVAL_S}"])
    outlets: list[Outlet] = []
    if jsonl is not None:
        outlets.append(JsonLines(jsonl))
    if prometheus is not None:
        outlets.append(Prometheus(prometheus))
    return Watch(
        Present(),
        detailed=detailed,
        interval_s=interval_s,
        outlets=outlets,
        on_sample=on_sample,
        is_out_of_memory=lambda error: is_out_of_memory(error) and not isinstance(error, VramfitError),  # explained
        advise=advise if plan_on_failure else None,
        show_findings=show_findings,
        stream=stream,
    )


class EmulatedMemory:
    """The memory of an emulated GPU."""

    name = "emulated"

    def __init__(self, gpu: EmulatedGPU) -> None:
        self.gpu = gpu
        self.capacity_bytes: int | None = gpu.memory_bytes

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def read(self) -> Reading:
        gpu = self.gpu
        return Reading(
            requested_bytes=gpu.requested_bytes,
            allocated_bytes=gpu.allocated_bytes,
            reserved_bytes=gpu.reserved_bytes,
            peak_requested_bytes=gpu.max_requested_bytes,
            peak_allocated_bytes=gpu.max_allocated_bytes,
            peak_reserved_bytes=gpu.max_reserved_bytes,
            num_retries=gpu.num_retries,
            num_ooms=gpu.num_failures,
        )

    def restart_peaks(self) -> None:
        self.gpu.reset_peaks()

    def process_bytes(self) -> int | None:
        return resident_bytes()

    def budget_bytes(self) -> int | None:
        return self.gpu.capacity_bytes

    def note(self) -> str | None:
        return "an emulated GPU: process memory is the host's"


class Present:
    """Whatever memory the program uses by now: an emulated GPU, CUDA once it has begun to, or the host's."""

    def __init__(self) -> None:
        self._now: MemorySource = HostMemory()
        self._at_fork = os.getpid()

    def _source(self) -> MemorySource:
        gpu = active_gpu()
        now = self._now
        if gpu is not None:
            if not isinstance(now, EmulatedMemory) or now.gpu is not gpu:
                self._now = EmulatedMemory(gpu)
        elif isinstance(now, HostMemory) and torch.cuda.is_initialized() and os.getpid() == self._at_fork:
            self._now = CudaMemory(torch.cuda.current_device())
        return self._now

    @property
    def name(self) -> str:
        return self._source().name

    @property
    def capacity_bytes(self) -> int | None:
        return self._source().capacity_bytes

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._source().owns(tensor)

    def read(self) -> Reading:
        return self._source().read()

    def restart_peaks(self) -> None:
        self._source().restart_peaks()

    def process_bytes(self) -> int | None:
        return self._source().process_bytes()

    def budget_bytes(self) -> int | None:
        return self._source().budget_bytes()

    def note(self) -> str | None:
        return self._source().note()
