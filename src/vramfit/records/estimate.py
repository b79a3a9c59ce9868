"""`Estimate`: what a workload will take on a GPU, with everything that shows why; `FitGrid`: what fits by size."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from vramfit.errors import VramfitError
from vramfit.records.codec import replace_file
from vramfit.records.finding import Displayed
from vramfit.settings.setting import Kind
from vramfit.workload import Workload

Basis = Literal["verified", "derived", "outside"]
TimeBasis = Literal["catalogue", "calibrated"]
Category = Literal["weights", "gradients", "optimizer", "activations", "temporaries", "workspaces", "inputs"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
FIGURES = ("requested", "allocated", "reserved", "process")
"""The four figures, each at most the next."""
PHASES = ("load", "first_step", "steady_step")
"""Phases of an estimate, in order; an inference's first and steady steps are its first and later batches."""
COPIES, HOST, HOST_STEP = "transfers", "host", "step from host memory"
"""In `Estimate.time_breakdown`: copies between host and device; the host's time, which goes beside the device's; what
an offloaded optimizer computes."""

ATTENTION_MODULES = ("self", "attn", "attention")
"""Last parts of the paths of modules in which scores are computed."""
MUCH_MASK = 0.1
"""Share of the peak from which attention masks are pointed out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseEstimate:
    """The peaks of one phase."""

    peak_requested_bytes: int
    """Sum of what live tensors and workspaces asked for."""
    peak_allocated_bytes: int
    """Blocks handed out: `torch.cuda.max_memory_allocated()`."""
    peak_reserved_bytes: int
    """Segments held, the most since the start: `torch.cuda.max_memory_reserved()`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMoment:
    """Where the allocated peak occurs."""

    phase: str
    part: str
    """load | inputs | forward | backward | optimizer."""
    module: str
    """Module path; empty outside a module (an optimizer step, a loss)."""
    operator: str
    """The operator whose request makes the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Like blocks that are live at the peak: same category, operator and module, layer numbers left out."""

    category: Category
    operator: str
    module: str
    """Path with `*` for the layer number."""
    num_blocks: int
    allocated_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelinePoint:
    """Allocated bytes over a stretch of the steady step."""

    part: str
    allocated_bytes: int
    """The most in this stretch."""
    requested_bytes: int = 0
    """What live tensors and workspaces asked for at that moment."""
    breakdown: Mapping[str, int] = field(default_factory=dict)
    """Category → bytes at that moment, what is empty left out; they add up to `allocated_bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Estimate(Displayed):
    """What a workload takes; `requested` ≤ `allocated` ≤ `reserved` ≤ `process`."""

    workload: Workload
    gpu: str | None
    """Catalogue name of the GPU predicted for; None for a memory size alone."""
    compute_capability: tuple[int, int]
    torch_version: str
    basis: Basis
    """`verified`: this (torch version, compute capability) has been measured; `derived`: rules carried over;
    `outside`: a torch release or a GPU that nothing is promised for."""
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_process_bytes: int
    """Reserved, and the CUDA context."""
    context_bytes: int
    safe_reserved_bytes: int
    """Upper bound of reserved over where the driver may put segments; what `fits` is decided on."""
    capacity_bytes: int | None
    """What PyTorch's allocator may reserve: `memory`, or the GPU's total less the context."""
    total_memory_bytes: int | None
    """The GPU's memory as CUDA reports it."""
    fits: bool | None
    """Whether it runs inside the capacity, wherever segments are put, in a process that has used cuBLAS before
    (one small product does), and inside `host_memory` where that is given; None without a capacity."""
    fits_cold: bool | None
    """The same in a process whose first matrix product is this workload's."""
    num_retries: int
    """How often the allocator had to free its cache and try again to stay inside the capacity."""
    phases: Mapping[str, PhaseEstimate]
    peak: PeakMoment
    breakdown: Mapping[str, int]
    """Category → allocated bytes at the peak; they add up to `peak_allocated_bytes`."""
    modules: Mapping[str, int]
    """Module path → allocated bytes at the peak; they add up likewise."""
    groups: tuple[TensorGroup, ...]
    """Live blocks at the peak, like ones together, largest first."""
    timeline: tuple[TimelinePoint, ...]
    """The steady step in equal stretches of requests."""
    notes: tuple[str, ...] = ()
    """What a reader should know: carried-over rules, a GPU that this torch cannot run."""
    step_time_s: float | None = None
    """Seconds of one steady step, all micro-batches and the optimizer; None without a GPU whose rates are known."""
    time_basis: TimeBasis | None = None
    """`catalogue`: published rates and the efficiencies seen on an H200; `calibrated`: measured on such a GPU."""
    time_breakdown: Mapping[str, float] = field(default_factory=dict)
    """What device (matrix products, attention, elementwise, optimizer, transfers) and host are busy with → seconds;
    they work side by side, so it adds up to more than the step."""
    host_bytes: int = 0
    """What offloading holds in host memory, beside the process itself."""
    context_basis: Literal["measured", "reported", "bounded"] = "bounded"
    """How `context_bytes` is known: `bounded` is an upper bound, where nobody published a figure of this GPU."""
    snapshot: Callable[[], dict[str, Any]] | None = field(
        default=None, repr=False, compare=False, metadata={"saved": False}
    )
    """Makes the predicted stream in the form of PyTorch's memory snapshots; not saved."""

    @property
    def free_bytes(self) -> int | None:
        """What the capacity leaves above `safe_reserved_bytes`; negative when it does not fit."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.safe_reserved_bytes

    @property
    def mask_bytes(self) -> int:
        """Of the blocks at the peak: the masks that layers of attention made for themselves."""
        masks = [g for g in self.groups if g.operator == "where" and g.module.rpartition(".")[2] in ATTENTION_MODULES]
        return sum(g.allocated_bytes for g in masks)

    @property
    def has_large_mask(self) -> bool:
        """Whether masks are a large part of the peak."""
        return self.mask_bytes >= MUCH_MASK * self.peak_allocated_bytes

    def save_snapshot(self, path: str | Path) -> None:
        """Write the predicted stream as PyTorch's memory visualiser (memory_viz) reads it.

        Raises:
            VramfitError: the estimate was read from a file and has no stream, or the path cannot be written.
        """
        if self.snapshot is None:
            raise VramfitError("an estimate read from a file has no stream to save", hint="estimate it again")
        replace_file(Path(path), pickle.dumps(self.snapshot()))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MaxBatch(Displayed):
    """The largest batch that fits."""

    batch: int
    """Effective batch, in a process that has used cuBLAS before; 0 when not even one sample fits."""
    cold_batch: int
    """The same in a process whose first matrix product is the workload's; never above `batch`."""
    estimate: Estimate
    """At that batch; at one sample when nothing fits."""
    limited_by: str
    """What stops the next batch: the phase and part that would run out, in words."""
    not_fitting: tuple[int, ...] = ()
    """Smaller batches that do not fit although this one does: fragmentation decides."""
    margin_batch: int | None = None
    """The largest that leaves the margin that plans keep; 0 when none does, None where it was not looked for."""
    margin_bytes: int = 0
    margin_reason: str = ""
    usual_precision: str | None = None
    """The lower precision that is usual on the GPU, where fp32 was only the default and this can be instead."""
    usual_batch: int | None = None
    """The largest batch in it that leaves the same margin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One change and what it would save, found by predicting it."""

    change: str
    """Keyword and value, as on the command line: `optimizer adamw-fused`."""
    kind: Kind
    saved_bytes: int
    """Of the allocated peak."""
    peak_allocated_bytes: int
    """After the change."""
    fits: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FitGrid:
    """The same job at several batches and lengths."""

    micro_batches: tuple[int, ...]
    """Samples a forward pass sees, ascending."""
    seqs: tuple[int, ...]
    """Tokens a sequence, ascending."""
    safe_reserved_bytes: tuple[tuple[int, ...], ...]
    """For each micro-batch, for each length: the upper bound of what is reserved."""
    fits: tuple[tuple[bool | None, ...], ...]
    """Likewise whether it fits; None without a capacity."""
    capacity_bytes: int | None
