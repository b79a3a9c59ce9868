"""`Explanation`: an out-of-memory message read: what was asked and held, by whom, what is to blame, and what fits."""

from dataclasses import dataclass
from typing import Literal

from vramfit.records.finding import Finding
from vramfit.records.plan import Plan

MessageKind = Literal["allocator", "driver", "library", "mps", "host allocator", "host killed"]
"""What ran out: PyTorch's GPU allocator, the driver, a library below PyTorch, Apple's MPS, the host, or its kernel."""

Cause = Literal["one request", "limit", "other process", "fragmentation", "job", "free but refused", "host", "unknown"]
"""What is to blame, in a word or two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessShare:
    """Another process on the GPU, as the message names it."""

    pid: int
    used_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemoryMessage:
    """One message, with the figures it gives; None where it does not say."""

    kind: MessageKind
    text: str
    """The message itself, in one line, shortened where it is very long."""
    line: int
    """Its line in the log, from 1."""
    device: int | None = None
    """The GPU's number."""
    requested_bytes: int | None = None
    """Asked for by the tensor that did not fit."""
    total_bytes: int | None = None
    """What the GPU has."""
    free_bytes: int | None = None
    """Free on the GPU."""
    allocated_bytes: int | None = None
    """In tensors of this process."""
    reserved_bytes: int | None = None
    """Held by PyTorch's allocator: allocated and cached."""
    allowed_bytes: int | None = None
    """A limit that was set for this process."""
    process_bytes: int | None = None
    """Held by this process in all, with the CUDA context."""
    private_pool_bytes: int | None = None
    """In pools of CUDA graphs, inside what is allocated."""
    other_processes: tuple[ProcessShare, ...] = ()

    @property
    def cached_bytes(self) -> int | None:
        """Reserved and in no tensor."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(self.reserved_bytes - self.allocated_bytes, 0)

    @property
    def others_bytes(self) -> int | None:
        """Held by other processes; None where the message leaves it open."""
        if self.other_processes:
            return sum(p.used_bytes for p in self.other_processes)
        if self.process_bytes is None or self.total_bytes is None or self.free_bytes is None:
            return None
        return max(self.total_bytes - self.free_bytes - self.process_bytes, 0)

    @property
    def outside_bytes(self) -> int | None:
        """Held on the GPU by anything but PyTorch's allocator: the CUDA context, libraries, other processes."""
        if self.total_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return None
        return max(self.total_bytes - self.free_bytes - self.reserved_bytes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """A part of the GPU's memory, and what holds it."""

    name: str
    num_bytes: int
    who: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What happened, in plain words and in figures."""

    message: OutOfMemoryMessage
    num_messages: int
    """Out-of-memory messages in the log; the one explained is the last that has figures, or the last."""
    cause: Cause
    headline: str
    """One sentence: what happened."""
    holdings: tuple[Holding, ...] = ()
    """Where the GPU's memory was, as far as the message says."""
    findings: tuple[Finding, ...] = ()
    """What is to blame, what else was noticed, what to do; the weightiest first."""
    budget_bytes: int | None = None
    """What PyTorch could have reserved then: the budget that the plan is made for."""
    gpu: str | None = None
    """The catalogue's name of the GPU, where it was given or the capacity tells; of several, the one that can least."""
    gpus_alike: tuple[str, ...] = ()
    """Others of the catalogue with the same capacity."""
    plan: Plan | None = None
    """Settings that fit, where the model was given."""
    no_plan: str | None = None
    """Why there is no plan, where one was asked for."""
