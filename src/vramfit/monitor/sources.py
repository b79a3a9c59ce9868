"""Whom to ask for memory: the CUDA allocator and NVML, or the host where there is no GPU."""

import os
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from vramfit.devices.probe import probe
from vramfit.monitor.readings import present_gpu, process_bytes

PROCESS_EVERY_S = 2.0
"""NVML takes milliseconds to answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What an allocator says at one moment; None where there is none."""

    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_requested_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    num_retries: int = 0
    num_ooms: int = 0


def held_bytes(reading: Reading) -> int | None:
    """What is allocated, or, where there is no allocator, requested."""
    return reading.allocated_bytes if reading.allocated_bytes is not None else reading.requested_bytes


class MemorySource(Protocol):
    """A device whose memory can be asked for at any moment, from any thread."""

    @property
    def name(self) -> str: ...
    @property
    def capacity_bytes(self) -> int | None: ...
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""

    def read(self) -> Reading: ...
    def restart_peaks(self) -> None: ...
    def process_bytes(self) -> int | None: ...
    def budget_bytes(self) -> int | None:
        """What the allocator holds and could still take."""

    def note(self) -> str | None:
        """What cannot be seen here, in words."""


class CudaMemory:
    """PyTorch's allocator on one GPU; no reading waits for the GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.name = f"cuda:{device}"
        self.capacity_bytes: int | None = torch.cuda.get_device_properties(device).total_memory
        self._asked_at = float("-inf")
        self._process_bytes: int | None = None
        self._uuid: str | None = None

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda" and tensor.device.index == self.device

    def read(self) -> Reading:
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        if not stats:
            return Reading(requested_bytes=0, allocated_bytes=0, reserved_bytes=0)
        requested, allocated, reserved = (
            stats[name]["all"] for name in ("requested_bytes", "allocated_bytes", "reserved_bytes")
        )
        return Reading(
            requested_bytes=requested["current"],
            allocated_bytes=allocated["current"],
            reserved_bytes=reserved["current"],
            peak_requested_bytes=requested["peak"],
            peak_allocated_bytes=allocated["peak"],
            peak_reserved_bytes=reserved["peak"],
            num_retries=stats["num_alloc_retries"],
            num_ooms=stats["num_ooms"],
        )

    def restart_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def process_bytes(self) -> int | None:
        """What the driver charges this process with, at most two seconds old."""
        now = time.monotonic()
        if now - self._asked_at >= PROCESS_EVERY_S:
            self._asked_at = now
            if self._uuid is None:
                gpu = present_gpu(torch.device("cuda", self.device))
                self._uuid = gpu.uuid if gpu is not None and gpu.uuid is not None else ""
            found = next((g for g in probe() if g.uuid == self._uuid), None)
            self._process_bytes = process_bytes(found)
        return self._process_bytes

    def budget_bytes(self) -> int | None:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self.device) * total_bytes)
        return min(free_bytes + (self.read().reserved_bytes or 0), allowed)

    def note(self) -> str | None:
        if self._asked_at > float("-inf") and self._process_bytes is None:
            return "NVML does not say what this process holds: the CUDA context is not in these figures"
        return None


class HostMemory:
    """The host's: no allocator to ask, only the process as a whole."""

    name = "cpu"
    capacity_bytes: int | None = None

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def read(self) -> Reading:
        return Reading()

    def restart_peaks(self) -> None:
        pass

    def process_bytes(self) -> int | None:
        return resident_bytes()

    def budget_bytes(self) -> int | None:
        return None

    def note(self) -> str | None:
        return "no GPU is in use: only the host memory of the process is known; in detail, tensors are counted too"


def resident_bytes() -> int | None:
    """Host memory that this process has in RAM; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
