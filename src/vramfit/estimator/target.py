"""`Target`: what a prediction is for: an architecture, a torch release and a capacity."""

import re
from dataclasses import dataclass
from importlib.metadata import version

from vramfit.cuda.profile import VERIFIED, CudaProfile
from vramfit.devices.catalogue import DEFAULT_ARCHITECTURE, GPU, all_gpus, find_gpu
from vramfit.errors import WorkloadError
from vramfit.records.estimate import Basis
from vramfit.units import format_bytes, shown
from vramfit.workload import Workload

OLDEST_TORCH = (2, 10)
OLDEST_CAPABILITY = (7, 5)
"""Torch 2.11's CUDA 13 builds hold code from sm_75 on; CUDA 12 builds from sm_50."""


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
    basis: Basis
    """Whether such predictions were compared with measurements."""
    notes: tuple[str, ...]


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
    return Target(
        gpu=gpu,
        profile=profile,
        torch_version=torch_version,
        capacity_bytes=_capacity(workload, gpu, profile),
        basis="verified" if profile.verified and not _uncertain(workload) else "derived",
        notes=_notes(workload, gpu, shape, profile),
    )


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


def _capacity(workload: Workload, gpu: GPU | None, profile: CudaProfile) -> int | None:
    if workload.memory is not None:
        return workload.memory
    if gpu is None:
        return None
    return gpu.total_memory_bytes - profile.context_bytes - (NCCL_BYTES if workload.num_gpus > 1 else 0)


def _typical(capability: tuple[int, int]) -> GPU:
    """The catalogue's largest GPU of an architecture: reductions grow with the multiprocessors."""
    return max((g for g in all_gpus() if g.compute_capability == capability), key=lambda g: g.num_multiprocessors)


def _release(text: str) -> tuple[int, int]:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", text)
    if match is None:
        raise WorkloadError([f"torch_version {shown(text)} is not a version such as 2.11 or 2.13.0"])
    release = (int(match[1]), int(match[2]))
    if release < OLDEST_TORCH:
        raise WorkloadError([f"torch_version {text} is older than 2.10, the oldest that is predicted for"])
    return release


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
    if not profile.verified:
        major, minor = profile.torch_version
        notes.append(
            f"derived: rules measured on sm_90 with torch 2.11 are carried over to {shape.sm}, torch {major}.{minor}"
        )
    else:
        notes += [f"derived: {what}" for what in _uncertain(workload)]
    if workload.num_gpus > 1:
        notes += _notes_of_ranks(workload)
    if profile.compute_capability < OLDEST_CAPABILITY:
        notes.append(
            f"torch {profile.torch_version[0]}.{profile.torch_version[1]} no longer runs on {shape.sm} "
            "(CUDA 13 builds start at sm_75): this is what it would take"
        )
    if workload.scales_loss and workload.trains:
        notes.append(
            "amp-fp16 may skip its first steps while the loss scale settles; predicted is the step that is taken"
        )
    return tuple(notes)
