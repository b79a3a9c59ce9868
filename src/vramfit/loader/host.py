"""The host's memory: what a load will take of it, against what is available, before anything is read."""

import errno
import zipfile
from pathlib import Path

import torch

from vramfit.checkpoints.entry import TORCH_DTYPES
from vramfit.checkpoints.inspection import Inspection
from vramfit.errors import NoPlanFits
from vramfit.loader.budget import tensor_bytes
from vramfit.loader.walk import Slot, tensor_slots
from vramfit.models.anatomy import encoder_layers
from vramfit.techniques import offloading, precision, quantization
from vramfit.units import format_bytes
from vramfit.workload import Workload

MEMINFO = Path("/proc/meminfo")
NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory", "cuda error: out of memory")
"""How torch words a host allocation that failed (c10/core/impl/alloc_cpu.cpp, aten/src/ATen/MapAllocator.cpp), and
CUDA pinned memory that it does not get."""


def check_host(
    model: torch.nn.Module,
    workload: Workload,
    inspection: Inspection | None,
    device: torch.device,
    num_resident: int,
) -> None:
    """Refuse a load that the host has no memory for; nothing is known of hosts without `/proc/meminfo`.

    Args:
        model: on the meta device, as it was built.
        inspection: of the checkpoint; None for random weights.
        num_resident: layers that stay on the device.

    Raises:
        NoPlanFits: with what it needs and what is available.
    """
    available = available_bytes()
    needed = own_bytes(model, workload, inspection, device, num_resident)
    if available is None or needed <= available:
        return
    mapped = inspection is not None and device.type == "cpu" and num_resident == len(encoder_layers(model))
    raise NoPlanFits(
        f"loading {workload.model} takes {format_bytes(needed)} of the host's memory, "
        f"and {format_bytes(available)} are available",
        shortfall_bytes=needed - available,
        hint="in the precision it was saved in and without quantize, its weights stay in the file and take none"
        if mapped
        else "end other programs, or take a smaller model",
    )


def own_bytes(
    model: torch.nn.Module,
    workload: Workload,
    inspection: Inspection | None,
    device: torch.device,
    num_resident: int,
) -> int:
    """The host memory that a load will take as the process's own: all but what stays mapped from the files.

    Weights that are drawn come in the type the model was built in and stay until all are in place; a change of type
    or a quantization on the host makes another copy; an offloaded layer is packed into a buffer of its own.
    """
    sizes = tensor_bytes(model, workload)
    waiting = encoder_layers(model)[num_resident:]
    waiting_modules = {id(module) for layer in waiting for module in layer.modules()}
    saved = {} if inspection is None else _saved_dtypes(inspection)
    linears = quantization.quantizable(model, workload.quantize) if workload.quantize is not None else []
    quantized = {id(linear.weight) for linear in linears}
    total = 0 if inspection is None else _read_whole(inspection)
    seen: set[int] = set()
    for slot in tensor_slots(model):
        if id(slot.tensor) in seen:
            continue
        seen.add(id(slot.tensor))
        before = saved.get(slot.path)
        if before is None:  # drawn or computed
            before = slot.tensor.dtype
            total += slot.tensor.numel() * slot.tensor.element_size()
        on_host = device.type == "cpu" or id(slot.module) in waiting_modules
        if on_host and (id(slot.tensor) in quantized or before != _final_dtype(slot, workload)):
            total += sizes[id(slot.tensor)]
    packed = [sum(sizes[id(p)] for p in layer.parameters()) for layer in waiting]
    slots = min(offloading.NUM_SLOTS, len(packed)) * max(packed, default=0) if device.type == "cpu" else 0
    return total + sum(packed) + slots


def _final_dtype(slot: Slot, workload: Workload) -> torch.dtype:
    casts = slot.tensor.is_floating_point() and not slot.is_computed
    return precision.weight_dtype(workload.precision) if casts else slot.tensor.dtype


def _saved_dtypes(inspection: Inspection) -> dict[str, torch.dtype]:
    """Model name → the type its tensor is saved in."""
    entries = {entry.name: entry for entry in inspection.entries}
    return {
        target: getattr(torch, TORCH_DTYPES[entries[name].dtype])
        for name, target in inspection.targets.items()
        if entries[name].dtype in TORCH_DTYPES
    }


def _read_whole(inspection: Inspection) -> int:
    """Bytes of pickles that cannot be mapped: those older than torch 1.6 are no zip archives."""
    if inspection.files.kind != "bin":
        return 0
    old = {path for path in inspection.files.paths if not zipfile.is_zipfile(path)}
    return sum(entry.num_bytes for entry in inspection.entries if entry.file in old)


def available_bytes() -> int | None:
    """What the host can still give without swapping; None where the system does not say."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def ran_out(error: BaseException) -> bool:
    """Whether an error says that the host had no memory to give."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return any(words in str(error).lower() for words in NO_MEMORY)
    return isinstance(error, MemoryError)
