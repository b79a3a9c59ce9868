"""`Place`: where a model runs: a GPU, the CPU, or an emulated GPU on the CPU; its memory is asked in one way."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vramfit.emulator.gpu import EmulatedGPU
from vramfit.errors import WorkloadError
from vramfit.loader.load import find_device
from vramfit.units import parse_bytes


class Place:
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
        self._retries_before = self._count_retries()
        self.held_bytes = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        """What this process held on the device before: no plan counts it."""

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

    @property
    def reserved_bytes(self) -> int | None:
        """The reserved peak so far; None on the CPU."""
        if self.emulated is not None:
            return self.emulated.max_reserved_bytes
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None

    @property
    def allocated_bytes(self) -> int | None:
        """The allocated peak so far; None on the CPU."""
        if self.emulated is not None:
            return self.emulated.max_allocated_bytes
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    @property
    def num_retries(self) -> int | None:
        """How often all that was cached was given back to make room since this was made; None on the CPU."""
        return self._count_retries() - self._retries_before if self.has_budget else None

    def _count_retries(self) -> int:
        """In this process so far."""
        if self.emulated is not None:
            return self.emulated.num_retries
        on_gpu = self.device.type == "cuda"
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)) if on_gpu else 0
