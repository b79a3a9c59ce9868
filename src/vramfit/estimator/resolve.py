"""From a model and keywords to a workload and the `Target` it is predicted for; every problem is reported at once.

A target is an architecture, a torch release and a capacity.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from vramfit.cuda.kernels.attention import writes_scores_unmasked
from vramfit.cuda.kernels.script import VERIFIED, CudaProfile
from vramfit.devices.catalogue import DEFAULT_ARCHITECTURE, GPU, ContextBasis, all_gpus, context_of, find_gpu
from vramfit.errors import WorkloadError
from vramfit.estimator.peaks import peak_requested, predict_peaks
from vramfit.estimator.traced import TracedWorkload
from vramfit.models.anatomy import encoder_layers, max_positions
from vramfit.models.build import missing_kernel, with_attention
from vramfit.models.resolve import ResolvedModel, resolve
from vramfit.records.estimate import Basis
from vramfit.settings import SETTINGS, conflicts
from vramfit.tasks import find_task
from vramfit.techniques import offloading
from vramfit.techniques.application import build_prepared
from vramfit.techniques.packing.attention import takes_heads
from vramfit.techniques.quantization import inner_tensors
from vramfit.trace.template import StreamTemplate
from vramfit.units import format_bytes, shown
from vramfit.workload import Workload, switched

OLDEST_TORCH = (2, 0)
"""Published measurements from torch 2.0 to 2.11 are compared with predictions in docs/cards.md; with 1.x, predictions
were too low in all of them."""
OLDEST_CAPABILITY = (7, 5)
"""Torch 2.11's CUDA 13 builds hold code from sm_75 on; CUDA 12 builds from sm_50."""
OLDEST_PROMISED_CAPABILITY = (5, 0)
"""Older GPUs, such as the K80, have run with PyTorch 1.x only."""
OUTSIDE = "outside what is promised"
"""What the note begins with that says that a prediction is not to be relied on."""


UNMASKED_NOTE = (
    "predicted for batches without padding, which take more than padded ones here: without a mask, torch has only a "
    "kernel that writes out all attention scores of grouped-query heads"
)
NCCL_BYTES = 512 * 2**20
"""What is left to NCCL of a GPU that is one of several. Its buffers come from the driver, and nothing predicts them:
they grow with channels and peers, some hundreds of MB for each process group. Not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where a workload is to run."""

    gpu: GPU | None
    profile: CudaProfile
    torch_version: str
    capacity_bytes: int | None
    """What PyTorch's allocator may reserve."""
    context_bytes: int
    """What CUDA's context takes of the GPU, beside the allocator's segments."""
    context_basis: ContextBasis
    """How that is known."""
    basis: Basis
    """Whether such predictions were compared with measurements."""
    notes: tuple[str, ...]
    compares_masks: bool = False
    """Whether batches without padding may take more than padded ones, and no mask was asked for."""


def target_of(workload: Workload) -> Target:
    """The target of a workload.

    Raises:
        UnknownGPU: no such GPU in the catalogue.
        WorkloadError: a torch release that is not supported.
    """
    torch_version = workload.torch_version or version("torch")
    gpu = find_gpu(workload.gpu) if workload.gpu is not None else None
    shape = gpu or _typical(DEFAULT_ARCHITECTURE)
    profile = CudaProfile(
        compute_capability=shape.compute_capability,
        num_multiprocessors=shape.num_multiprocessors,
        max_threads_per_multiprocessor=shape.max_threads_per_multiprocessor,
        torch_version=_release(torch_version),
    )
    context_bytes, context_basis = context_of(gpu)
    return Target(
        gpu=gpu,
        profile=profile,
        torch_version=torch_version,
        capacity_bytes=_capacity(workload, gpu, context_bytes),
        context_bytes=context_bytes,
        context_basis=context_basis,
        basis=_basis(workload, profile),
        notes=_notes(workload, gpu, shape, profile),
    )


def _basis(workload: Workload, profile: CudaProfile) -> Basis:
    if _why_outside(profile) is not None:
        return "outside"
    return "verified" if profile.verified and not _uncertain(workload) else "derived"


def _why_outside(profile: CudaProfile) -> str | None:
    """Why predictions are not promised for a torch release or a GPU; None where they are."""
    major, minor = profile.torch_version
    if profile.torch_version < OLDEST_TORCH:
        return f"torch {major}.{minor} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
    if profile.compute_capability < OLDEST_PROMISED_CAPABILITY:
        return "this GPU has run with torch 1.x only"
    return None


def is_measured(gpu: str) -> bool:
    """Whether a GPU of this architecture was measured, with whatever torch."""
    return find_gpu(gpu).compute_capability in {capability for _, capability in VERIFIED}


def _uncertain(workload: Workload) -> list[str]:
    """Techniques whose figures are not exact, and why."""
    found = {
        "what one GPU of several takes is read from torch's sources": workload.num_gpus > 1,
        "what compiled layers keep is what torch's partitioner says, with all that can be fused taken for fused": (
            workload.is_compiled
        ),
        "casts made together lie in other blocks from process to process, unless segments are expandable": (
            workload.casts_by_layer and workload.trains and workload.autocasts and not workload.has_expandable_segments
        ),
        "recorded passes and fused layers were measured where segments are expandable only": (
            (workload.captures_graphs or workload.is_fused) and not workload.has_expandable_segments
        ),
    }
    return [what for what, is_used in found.items() if is_used]


def _capacity(workload: Workload, gpu: GPU | None, context_bytes: int) -> int | None:
    if workload.memory is not None:
        return workload.memory
    if gpu is None:
        return None
    return gpu.total_memory_bytes - context_bytes - (NCCL_BYTES if workload.num_gpus > 1 else 0)


def _typical(capability: tuple[int, int]) -> GPU:
    """The catalogue's largest GPU of an architecture: reductions grow with the multiprocessors."""
    return max((g for g in all_gpus() if g.compute_capability == capability), key=lambda g: g.num_multiprocessors)


def _release(text: str) -> tuple[int, int]:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", text)
    if match is None:
        raise WorkloadError([f"torch_version {shown(text)} is not a version such as 2.11 or 2.13.0"])
    return int(match[1]), int(match[2])


def _notes_of_ranks(w: Workload) -> list[str]:
    """What a figure for one GPU of several stands for, and what it leaves out."""
    kind = "has a part of the model (fsdp)" if w.parallel == "fsdp" else "has the whole model (ddp)"
    each = f"each of {w.num_gpus:,} GPUs {kind} and passes {w.share:,} of {w.batch:,} samples a step"
    kept = "nothing of memory" if w.memory is not None else f"{format_bytes(NCCL_BYTES)} of the GPU"
    return [
        f"figures are of rank 0: {each}; no rank takes more, since passes are cut by tokens on all of them",
        "not in these figures: NCCL's own buffers, which come from the driver and cannot be predicted, some hundreds "
        f"of MB for each process group; {kept} is set aside for them",
    ]


def _notes(workload: Workload, gpu: GPU | None, shape: GPU, profile: CudaProfile) -> tuple[str, ...]:
    notes = []
    if gpu is None:
        notes.append(f"no gpu given: predicted for {shape.sm}, the architecture of {shape.title}")
    major, minor = profile.torch_version
    if why := _why_outside(profile):
        notes.append(
            f"{OUTSIDE}: {why}, and PyTorch 1.x takes more than is predicted here; keep a quarter spare. "
            f"Promised are torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} and newer on GPUs from sm_50 on"
        )
    elif not profile.verified:
        notes.append(
            f"derived: rules measured on sm_90 with torch 2.11 are carried over to {shape.sm}, torch {major}.{minor}"
        )
    else:
        notes += [f"derived: {what}" for what in _uncertain(workload)]
    if workload.num_gpus > 1:
        notes += _notes_of_ranks(workload)
    if profile.compute_capability < OLDEST_CAPABILITY and profile.torch_version >= OLDEST_TORCH:
        notes.append(
            f"torch {major}.{minor} no longer runs on {shape.sm} "
            "(CUDA 13 builds start at sm_75): this is what it would take"
        )
    if workload.scales_loss and workload.trains:
        notes.append(
            "amp-fp16 may skip its first steps while the loss scale settles; the prediction is for a step that is taken"
        )
    return tuple(notes)


def settle_offload(traced: TracedWorkload, target: Target) -> TracedWorkload:
    """The inference with as many resident layers as its capacity allows; none where there is no capacity to fit."""
    if target.capacity_bytes is None:
        return traced
    return OffloadedWorkload(traced.workload, traced.resolved, traced.profile, capacity_bytes=target.capacity_bytes)


@dataclass(frozen=True, slots=True)
class OffloadedWorkload(TracedWorkload):
    """A workload whose resident layers are as many as a capacity allows, settled for each batch.

    Where not even the workload without resident layers fits, it has none, and its estimate says so.
    """

    capacity_bytes: int = 0
    settled: dict[int, int] = field(default_factory=dict, init=False, compare=False)
    """Micro-batch → layers that stay, where that is known."""

    def template(self, micro_batch: int) -> StreamTemplate:
        return self._with(self.resident_layers(micro_batch)).template(micro_batch)

    def resident_layers(self, micro_batch: int) -> int:
        """The most layers that can stay on the device at a micro-batch."""
        if micro_batch not in self.settled:
            stream = self._with(0).stream(micro_batch)
            spare_bytes = self.capacity_bytes - peak_requested(stream)
            worth_trying = [n for n, more_bytes in self._candidates() if more_bytes <= spare_bytes]
            self.settled[micro_batch] = _most(worth_trying, lambda n: self._fits(n, micro_batch))
        return self.settled[micro_batch]

    def _with(self, num_resident: int) -> TracedWorkload:
        return TracedWorkload(self.workload, self.resolved, self.profile, num_resident)

    def _fits(self, num_resident: int, micro_batch: int) -> bool:
        stream = self._with(num_resident).stream(micro_batch)
        outcome = predict_peaks(stream, self.options, self.capacity_bytes)
        return bool(outcome.fits) and outcome.num_retries == 0

    def _candidates(self) -> list[tuple[int, int]]:
        """Numbers of resident layers, fewest first, each with what it requests beyond none at all.

        With one or two layers offloaded, their slots take as much as the layers: those numbers save nothing.
        """
        model = build_prepared(self.resolved, self.workload)
        layers = encoder_layers(model)
        parts = [[part for p in layer.parameters() for _, part in inner_tensors(p)] for layer in layers]
        sizes = [sum(part.numel() * part.element_size() for part in inside) for inside in parts]
        slots = min(offloading.NUM_SLOTS, len(layers)) * max(map(offloading.device_bytes, parts), default=0)
        some = range(1, len(layers) - offloading.NUM_SLOTS)
        return [(n, sum(sizes[:n])) for n in some] + [(len(layers), sum(sizes) - slots)]


def _most(candidates: list[int], fits: Callable[[int], bool]) -> int:
    """The largest candidate that fits, or none (0): the last two are tried, then halves, each costing a trace."""
    for last in reversed(candidates[-2:]):
        if fits(last):
            return last
    low, high = 0, len(candidates) - 2  # of the first `low` the last fits; from `high` on none does
    while low < high:
        middle = (low + high) // 2
        if fits(candidates[middle]):
            low = middle + 1
        else:
            high = middle
    return candidates[low - 1] if low > 0 else 0


def resolve_workload(model: Any, keywords: dict[str, Any]) -> tuple[TracedWorkload, Target]:
    """A workload checked against its model and its GPU.

    Args:
        model: a name, a folder, a hub id, a configuration or an `nn.Module`.
        keywords: fields of `Workload`, and `trust_remote_code`.

    Raises:
        WorkloadError: everything that does not go together.
        UnknownModel, UnknownGPU: no such name.
    """
    trust = keywords.get("trust_remote_code", False)
    if problems := switched("trust_remote_code", trust):
        raise WorkloadError(problems)
    given = {name: value for name, value in keywords.items() if name != "trust_remote_code"}
    name = model if isinstance(model, str) and model else type(model).__name__
    workload = Workload.from_keywords(model=name, **given)
    resolved = resolve(model, task=workload.task, num_labels=workload.num_labels, trust_remote_code=trust)
    problems = _beyond_the_model(workload, resolved)
    target = _target(workload, problems)
    if target is None or problems:
        raise WorkloadError(problems)
    workload = with_attention(replace(workload, model=resolved.name, task=resolved.task), resolved)
    settled = with_mask(workload, resolved, target.profile, given)
    target = replace(target, compares_masks=settled.mask != workload.mask)
    traced = TracedWorkload(settled, resolved, target.profile)
    waits = workload.offloads_layers and not workload.trains  # in training, all layers do
    return (settle_offload(traced, target) if waits else traced), target


def with_mask(workload: Workload, resolved: ResolvedModel, profile: CudaProfile, given: Mapping[str, Any]) -> Workload:
    """A workload with the mask whose attention takes the most memory: padded, except for some grouped-query heads.

    Where the peak is elsewhere, padded batches may take a little more all the same: `estimate_at` compares both.

    Args:
        given: keywords that were asked for; a mask among them is left alone.
    """
    if "mask" in given or not workload.is_sdpa or resolved.module is not None:
        return workload
    dtype = workload.autocast_dtype or workload.weight_dtype
    takes_more = writes_scores_unmasked(profile, resolved.config, dtype)
    return replace(workload, mask="ones" if takes_more else SETTINGS["mask"].default)


def _target(workload: Workload, problems: list[str]) -> Target | None:
    """Where the workload is to run; what it asks of a GPU that does not have it is added to the problems."""
    try:
        target = target_of(workload)
    except WorkloadError as error:
        problems += error.problems
        return None
    name = "the GPU" if target.gpu is None else target.gpu.name
    problems += conflicts(workload, target.profile.compute_capability, name)
    return target


def _beyond_the_model(workload: Workload, resolved: ResolvedModel) -> list[str]:
    """What the workload asks of this model that it does not have."""
    why_no_loss = find_task(workload.task).why_no_loss
    problems = [why_no_loss] if why_no_loss and workload.trains and resolved.module is None else []
    longest = max_positions(resolved.config) if resolved.config is not None else None
    seq = max(workload.seq, *(workload.lengths or (0,)))
    if longest is not None and seq > longest:
        what = f"seq {seq}" if seq == workload.seq else f"lengths: {seq:,} tokens"
        problems.append(f"{what} is beyond the {longest} positions of {resolved.name}: take {longest} or fewer")
    problems += missing_kernel(resolved, workload)
    if workload.is_packed and not takes_heads(resolved.config):
        problems.append(
            f"attention packed: the flash kernel takes heads of 8, 16, … 256, and {resolved.name} has others"
        )
    return problems
