"""`WatchRecord`: what a watched program took by phase, what it wasted, and what was alive when memory ran out.

`Explanation`: an out-of-memory message read: what was asked and held, by whom, what is to blame, and what fits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from vramfit.records.finding import Displayed, Finding, Severity
from vramfit.records.plan import Plan
from vramfit.units import format_bytes

WatchPhase = Literal["load", "forward", "backward", "optimizer", "evaluation", "other"]
WATCH_PHASES: tuple[WatchPhase, ...] = get_args(WatchPhase)
MAX_ALIVE_SHOWN = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySample:
    """Memory at one moment; None where no source reports it."""

    time_s: float
    """Since the watch began."""
    phase: WatchPhase
    step: int
    """Optimizer steps taken so far."""
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    """What the driver charges the process with; on a machine without a GPU, its resident memory."""
    num_retries: int = 0
    """Times the allocator freed its cache to make room, since the process began."""
    num_ooms: int = 0

    @property
    def fragmentation(self) -> float | None:
        """Share of the reserved memory that is in no block."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseUse:
    """What one phase took at the most, over all the times it ran."""

    num_times: int
    time_s: float
    peak_requested_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveTensors:
    """Tensors of one origin that are alive together."""

    category: str
    """weights, gradients, optimizer, activations, outputs, inputs or other."""
    module: str = ""
    """Path of the module that made them."""
    operator: str = ""
    """The aten operator that made them; where that was not recorded, their shape."""
    source: str = ""
    """file:line of the user's code that led there."""
    phase: str = ""
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFinding:
    """A habit that costs memory: where it is, what it costs, and the change that mends it."""

    check: str
    """A stable, dotted name such as `watch.eval-keeps-graph`."""
    severity: Severity = "warning"
    module: str
    source: str
    """file:line."""
    num_bytes: int
    """What it held at the most, or holds."""
    what: str
    why: str
    fix: str

    def as_finding(self) -> Finding:
        """For the renderers of findings."""
        where = " in ".join(part for part in (self.source, self.module) if part)
        what = f"{where}: {self.what}" if where else self.what
        return Finding(check=self.check, severity=self.severity, what=what, why=self.why, fix=self.fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemoryReport:
    """What was alive when memory ran out."""

    message: str
    """The error's own words."""
    phase: WatchPhase
    step: int
    module: str = ""
    """The module that was running."""
    operator: str = ""
    source: str = ""
    """file:line of the user's code."""
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    alive: tuple[LiveTensors, ...] = ()
    """By category, module and operator, most first."""
    findings: tuple[MemoryFinding, ...] = ()
    """Habits noticed until then: each is memory that need not have been there."""
    remedies: tuple[str, ...] = ()
    """Changes that would have avoided it."""

    def lines(self) -> Iterator[str]:
        """In plain words, for standard error."""
        place = " in ".join(part for part in (self.operator, self.module) if part)
        at = f", {place}" if place else ""
        yield f"vramfit: out of memory in {self.phase}, step {self.step}{at}"
        if self.source:
            yield f"  called from {self.source}"
        if self.allocated_bytes is not None and self.reserved_bytes is not None:
            cached = self.reserved_bytes - self.allocated_bytes
            yield f"  {format_bytes(self.allocated_bytes)} in blocks, {format_bytes(cached)} cached"
        if self.alive:
            yield "  alive then:"
        groups = layers_together(self.alive)
        for group in groups[:MAX_ALIVE_SHOWN]:
            yield f"  {format_bytes(group.num_bytes):>12}  {origin_words(group)}"
        rest = groups[MAX_ALIVE_SHOWN:]
        if rest:
            yield f"  {format_bytes(sum(g.num_bytes for g in rest)):>12}  in {len(rest)} smaller groups"
        for finding in self.findings:
            yield f"  ! {finding.as_finding().what}"
            yield f"    → {finding.fix}"


def layers_together(groups: "tuple[LiveTensors, ...]") -> list[LiveTensors]:
    """The same tensors of all layers as one group, with `*` for the layer's number; most first."""
    merged: dict[tuple[str, str, str, str, str], LiveTensors] = {}
    for group in groups:
        module = ".".join("*" if part.isdigit() else part for part in group.module.split("."))
        key = group.category, module, group.operator, group.source, group.phase
        known = merged.get(key)
        merged[key] = replace(
            group,
            module=module if known is not None else group.module,
            num_tensors=group.num_tensors + (known.num_tensors if known else 0),
            num_bytes=group.num_bytes + (known.num_bytes if known else 0),
        )
    return sorted(merged.values(), key=lambda g: -g.num_bytes)


def origin_words(group: LiveTensors) -> str:
    """Where a group comes from, in one line."""
    made = " in ".join(part for part in (group.operator, group.module) if part)
    parts = [group.category, made, group.source]
    return ", ".join(part for part in parts if part) + (f" (× {group.num_tensors:,})" if group.num_tensors > 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class WatchRecord(Displayed):
    """A watched program, so far or to its end."""

    device: str
    """cuda:0, emulated, or cpu."""
    detailed: bool
    time_s: float
    num_steps: int
    num_forwards: int
    """Calls of whole models, in training and evaluation."""
    capacity_bytes: int | None = None
    phases: Mapping[str, PhaseUse] = field(default_factory=dict)
    peak_requested_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_process_bytes: int | None = None
    num_retries: int = 0
    """Allocator retries while it was watched."""
    num_ooms: int = 0
    samples: tuple[MemorySample, ...] = ()
    """A thinned series over the whole time."""
    findings: tuple[MemoryFinding, ...] = ()
    largest: tuple[LiveTensors, ...] = ()
    """In detailed mode: what was alive when most was allocated at the end of a phase, most first."""
    out_of_memory: tuple[OutOfMemoryReport, ...] = ()
    notes: tuple[str, ...] = ()


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
