"""Single readings of a GPU's memory: the allocator's peaks, and what the driver charges this process with."""

import os
from dataclasses import dataclass

import torch

from vramfit.devices.probe import PresentGPU, probe
from vramfit.records.measurement import PhaseMeasurement


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorCounts:
    """Counters of the allocator since the process began."""

    reserved_bytes: int
    num_retries: int
    num_ooms: int


def restart_peaks(device: torch.device) -> None:
    """From here on peaks count anew, from what is held now."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)


def read_peaks(device: torch.device) -> PhaseMeasurement:
    """The peaks since `restart_peaks`, when all work queued so far is done."""
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return PhaseMeasurement(
        peak_requested_bytes=stats.get("requested_bytes.all.peak", 0),
        peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
        peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
    )


def read_counts(device: torch.device) -> AllocatorCounts:
    """What the allocator holds, and how often it was short."""
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return AllocatorCounts(
        reserved_bytes=stats.get("reserved_bytes.all.current", 0),
        num_retries=stats.get("num_alloc_retries", 0),
        num_ooms=stats.get("num_ooms", 0),
    )


def present_gpu(device: torch.device) -> PresentGPU | None:
    """What the driver says of torch's device; None where it cannot be asked."""
    return next((gpu for gpu in probe(with_torch=True) if gpu.cuda_index == (device.index or 0)), None)


def process_bytes(gpu: PresentGPU | None, *, pid: int | None = None) -> int | None:
    """What the driver charges this process with on a GPU; None where it does not say.

    Inside a container the driver numbers processes as the host does: a single process that holds memory is
    then this one.
    """
    if gpu is None:
        return None
    own = os.getpid() if pid is None else pid
    by_pid = {process.pid: process.used_bytes for process in gpu.processes}
    if own not in by_pid and len(by_pid) == 1:
        return next(iter(by_pid.values()))
    return by_pid.get(own)
