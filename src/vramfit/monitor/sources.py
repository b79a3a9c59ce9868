"""Memory asked for: of the CUDA allocator, of NVML, or of the host where there is no GPU; and peaks by phase."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from vramfit.devices.probe import PresentGPU, probe
from vramfit.records.measurement import PhaseMeasurement
from vramfit.records.watch import MemorySample, PhaseUse, WatchPhase

PROCESS_EVERY_S = 2.0
"""NVML takes milliseconds to answer."""
MAX_SAMPLES = 2_000
FIGURES = ("requested_bytes", "allocated_bytes", "reserved_bytes")


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
        figures = {name: stats[name]["all"]["current"] for name in FIGURES}
        figures |= {f"peak_{name}": stats[name]["all"]["peak"] for name in FIGURES}
        return Reading(**figures, num_retries=stats["num_alloc_retries"], num_ooms=stats["num_ooms"])

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
    return PhaseMeasurement(**{f"peak_{name}": stats.get(f"{name}.all.peak", 0) for name in FIGURES})


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


class PhasePeaks:
    """Peaks by phase.

    An allocator's own peaks count from whenever they were reset last. A phase that raised such a peak has reached it;
    one that did not is known by the figures at its ends and at the samples in between, which are a lower bound.
    Where peaks may be reset at every phase, all are exact.
    """

    def __init__(self) -> None:
        self.began_at = time.perf_counter()
        self.samples: list[MemorySample] = []
        self.last = Reading()
        self.peak_process_bytes: int | None = None
        self._uses: dict[str, PhaseUse] = {}
        self._entered = Reading()
        self._entered_at = self.began_at
        self._device = ""
        self._every = 1
        self._skipped = 0

    def enter(self, reading: Reading) -> None:
        """A phase begins."""
        self.last = self._entered = reading
        self._entered_at = time.perf_counter()

    def leave(self, phase: WatchPhase, reading: Reading) -> None:
        """A phase ends, with what is held now and the allocator's peaks."""
        self.see(phase, reading)
        use = self._uses[phase]
        time_s = use.time_s + time.perf_counter() - self._entered_at
        self._uses[phase] = replace(use, num_times=use.num_times + 1, time_s=time_s)

    def see(self, phase: WatchPhase, reading: Reading) -> None:
        """Something in the middle of a phase."""
        self.last = reading
        use = self._uses.get(phase, PhaseUse(num_times=0, time_s=0.0))
        most: dict[str, Any] = {}
        for name in FIGURES:
            peak = f"peak_{name}"
            before, after = getattr(self._entered, peak), getattr(reading, peak)
            was_raised = after is not None and (before is None or after > before)
            seen = (
                getattr(use, peak),
                getattr(self._entered, name),
                getattr(reading, name),
                after if was_raised else None,
            )
            most[peak] = _most(seen)
        self._uses[phase] = replace(use, **most)

    def sample(self, sample: MemorySample, device: str) -> None:
        """Keep a sample; when there are too many, every other one goes.

        A program that begins to use the GPU is charged by another: what its process held before is forgotten.
        """
        if device != self._device:
            self._device, self.peak_process_bytes = device, None
            self.samples = [replace(s, process_bytes=None) for s in self.samples]
        held = sample.process_bytes
        if held is not None:
            self.peak_process_bytes = max(held, self.peak_process_bytes or 0)
        self._skipped += 1
        if self._skipped >= self._every:
            self._skipped = 0
            self.samples.append(sample)
        if len(self.samples) > MAX_SAMPLES:
            self.samples = self.samples[::2]
            self._every *= 2

    def phases(self) -> dict[str, PhaseUse]:
        """What each phase took at the most."""
        return dict(self._uses)

    def peak(self, name: str) -> int | None:
        """The most of all phases, of one figure."""
        return _most(getattr(use, f"peak_{name}") for use in list(self._uses.values()))


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
