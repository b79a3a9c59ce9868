"""`RunDevice`: the device a run uses: a GPU, the CPU, or an emulated GPU on the CPU; and the budget held on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vramfit.devices.catalogue import match_gpu
from vramfit.emulator.gpu import EmulatedGPU
from vramfit.errors import BudgetExceeded, WorkloadError
from vramfit.loader.load import find_device
from vramfit.monitor.sources import CudaMemory, HostMemory, MemorySource, Reading, resident_bytes
from vramfit.step.recovery import free_memory
from vramfit.techniques.application import use_expandable_segments
from vramfit.units import format_bytes, parse_bytes


class RunDevice:
    """A device to run on.

    Args:
        name: cuda, cuda:N, cpu or emulated; None takes the GPU where there is one.
        memory: the size of an emulated GPU; elsewhere it is the caller's to hold.
        fail_at: numbers of allocations that fail on an emulated GPU.

    Raises:
        WorkloadError: no such device here, or an emulated GPU without a size.
    """

    def __init__(self, name: str | None = None, *, memory: str | int | None = None, fail_at: tuple[int, ...] = ()):
        self.name = name or ("cuda" if torch.cuda.is_available() else "cpu")
        self.emulated: EmulatedGPU | None = None
        if self.name == "emulated":
            if memory is None:
                raise WorkloadError(["device emulated needs memory: how large the GPU is to be"])
            # the Stepper lets segments grow on a real GPU, and so does this one
            self.emulated = EmulatedGPU(parse_bytes(memory, name="memory"), fail_at=fail_at, allocator="expandable")
        self.device = find_device("cpu" if self.name == "emulated" else self.name, "emulated")
        if self.device.type == "cuda":
            self.name = str(self.device)
        self._memory: MemorySource = HostMemory()
        if self.emulated is not None:
            self._memory = EmulatedMemory(self.emulated)
        elif self.device.type == "cuda":
            self._memory = CudaMemory(self.device.index)
        now = self._memory.read()
        self._retries_before = now.num_retries
        self.held_bytes = 0 if self.emulated is not None else now.allocated_bytes or 0
        """What this process held on the device before: no plan counts it."""
        self.least_free_bytes: int | None = None
        """What is free on the GPU that has least, where several processes share a run and have asked each other."""

    @property
    def gpu(self) -> str | None:
        """The catalogue's name of the GPU; None where it is none, or not known."""
        if self.device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(self.device)
        found = match_gpu(properties.name, properties.total_memory)
        return found.name if found is not None else None

    @property
    def capability(self) -> tuple[int, int] | None:
        """Of the GPU; None where none computes."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None

    @property
    def has_budget(self) -> bool:
        """Whether memory can run out here in a way that can be planned for."""
        return self.name != "cpu"

    @property
    def computes_apart(self) -> bool:
        """Whether the host can go on while the device computes."""
        return self.device.type == "cuda"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the work of a model goes on; an emulated GPU counts what it takes."""
        if self.emulated is None:
            yield
            return
        with self.emulated:
            yield

    def read(self) -> Reading:
        """The allocator's counters now; nothing waits for the device."""
        return self._memory.read()

    def available_bytes(self, limit_bytes: int) -> int:
        """What this process holds on the device and could still take, but for the limit it has set itself.

        Args:
            limit_bytes: that limit; a lower one has been set by others, and counts.
        """
        if self.device.type != "cuda":
            return self._memory.budget_bytes() or 0
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        allowed_bytes = int(torch.cuda.get_per_process_memory_fraction(self.device) * total_bytes)
        there = free_bytes + torch.cuda.memory_reserved(self.device)
        return min(there, allowed_bytes) if allowed_bytes < limit_bytes - 1 else there  # the fraction is rounded

    def release_cache(self) -> None:
        """Give back what is cached, so that the device's free memory is what others can take."""
        free_memory()
        if self.emulated is not None:
            self.emulated.empty_cache()

    @property
    def reserved_bytes(self) -> int | None:
        """The reserved peak so far; None on the CPU."""
        return self._memory.read().peak_reserved_bytes

    @property
    def allocated_bytes(self) -> int | None:
        """The allocated peak so far; None on the CPU."""
        return self._memory.read().peak_allocated_bytes

    @property
    def num_retries(self) -> int | None:
        """How often all that was cached was given back to make room since this was made; None on the CPU."""
        return self._memory.read().num_retries - self._retries_before if self.has_budget else None


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


def enforce(memory: str | int, device: torch.device) -> int:
    """Cap what PyTorch may reserve on a GPU from now on, and have segments grow in place; gives the cap in bytes.

    Elsewhere than on a GPU there is no such allocator, and nothing is done.

    Raises:
        WorkloadError: more than the GPU has.
        BudgetExceeded: the process holds more already.
    """
    num_bytes = parse_bytes(memory, name="memory")
    if device.type != "cuda":
        return num_bytes
    use_expandable_segments(device)
    total = torch.cuda.get_device_properties(device).total_memory
    if num_bytes > total:
        raise WorkloadError([f"memory {format_bytes(num_bytes)} is more than the {format_bytes(total)} of {device}"])
    if torch.cuda.memory_reserved(device) > num_bytes:
        torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    if held > num_bytes:
        raise BudgetExceeded(
            f"this process holds {format_bytes(held)} of {device} already, the budget is {format_bytes(num_bytes)}",
            predicted_bytes=num_bytes,
            observed_bytes=held,
            phase="load",
            hint="free what was made before, or give a larger memory",
        )
    # the allocator takes a fraction of the total and rounds down
    torch.cuda.set_per_process_memory_fraction(min(1.0, (num_bytes + 0.5) / total), device)
    return num_bytes
