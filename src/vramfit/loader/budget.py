"""Whether a model's weights fit, on the device and in the host's memory, before the first of them is read.

Where they do not fit the device, also how many layers stay there.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vramfit.checkpoints.inspection import Inspection
from vramfit.checkpoints.safetensors_file import TORCH_DTYPES
from vramfit.errors import MissingExtra, NoPlanFits, WorkloadError
from vramfit.loader.filling import tensor_slots
from vramfit.loader.load import LoadRequest
from vramfit.models.anatomy import encoder_layers
from vramfit.settings import SETTINGS
from vramfit.techniques import offloading, quantization
from vramfit.units import format_bytes
from vramfit.workload import Workload

ACTIVATIONS = 4
"""One part in four of a GPU's free memory is left to activations where layers are offloaded and no memory is given."""
MEMINFO = Path("/proc/meminfo")


def resident_layers(request: LoadRequest, model: torch.nn.Module, device: torch.device) -> int:
    """How many layers are to stay on the device; all of them unless the request offloads.

    A request's memory is for weights alone, and what fits is put there: whoever runs the model leaves room for
    activations by asking an estimate for the weights' share (`Estimate.breakdown["weights"]`).

    Args:
        model: on the meta device, as it was built.

    Raises:
        NoPlanFits: the weights do not fit; says by how much, and what would help.
        WorkloadError: an offload without anything to fit into.
    """
    layers, w = encoder_layers(model), request.workload
    free = free_bytes(device)
    budget_bytes = w.memory if w.memory is not None else free
    if budget_bytes is None:
        if request.offloads:
            raise WorkloadError(["offload weights needs memory on a device that does not say what is free"])
        return len(layers)
    sizes = tensor_bytes(model, w)
    total = sum(sizes.values())
    if request.offloads and w.memory is None:
        budget_bytes -= budget_bytes // ACTIVATIONS
    if total <= budget_bytes:
        return len(layers)
    if request.offloads:
        return offloading.choose_resident(total, _by_layer(layers, sizes), budget_bytes)
    raise NoPlanFits(
        f"the weights of {w.model} take {format_bytes(total)} in {w.weights_in_words}, and "
        f"{format_bytes(budget_bytes)} {'are allowed' if w.memory is not None else f'are free on {device}'}",
        shortfall_bytes=total - budget_bytes,
        hint=_less(model, w, total),
    )


def _less(model: torch.nn.Module, w: Workload, total_bytes: int) -> str:
    """What the weights would take otherwise, in figures of this model."""
    less = {s.keyword: s.less_weight for s in SETTINGS.values() if s.less_weight is not None}
    changes = {f"with {name} {value}": {name: value} for name, value in less.items()} | {"with both": less}
    taken = {total_bytes}
    said = []
    for name, change in changes.items():
        try:
            other = sum(tensor_bytes(model, replace(w, **change)).values())
        except MissingExtra:
            continue
        if other < total_bytes and other not in taken:
            said.append(f"{format_bytes(other)} {name}")
        taken.add(other)
    offloaded = f"offload weights keeps {format_bytes(_least_bytes(model, w))} or more on the device"
    return "; ".join([f"they would take {', '.join(said)}", offloaded] if said else [offloaded])


def _least_bytes(model: torch.nn.Module, w: Workload) -> int:
    """What the device holds with every layer offloaded."""
    sizes = tensor_bytes(model, w)
    layers = _by_layer(encoder_layers(model), sizes)
    return sum(sizes.values()) - sum(layers) + _slot_bytes(layers)


def _by_layer(layers: Sequence[torch.nn.Module], sizes: dict[int, int]) -> list[int]:
    return [sum(sizes[id(p)] for p in layer.parameters()) for layer in layers]


def _slot_bytes(layers: Sequence[int]) -> int:
    """What offloaded layers come to for their turn."""
    return min(offloading.NUM_SLOTS, len(layers)) * max(layers, default=0)


def tensor_bytes(model: torch.nn.Module, workload: Workload) -> dict[int, int]:
    """What each tensor of a model will take on the device, by identity, in the precision of a workload."""
    dtype = workload.weight_dtype
    quantized = _quantized(model, workload)
    by_shape: dict[tuple[int, ...], int] = {}
    sizes = {}
    for slot in tensor_slots(model):
        final = torch.empty_like(slot.tensor, dtype=dtype if slot.is_cast else None)
        shape = tuple(final.shape)
        if id(slot.tensor) not in quantized:
            sizes[id(slot.tensor)] = offloading.device_bytes([final])
            continue
        if shape not in by_shape:
            by_shape[shape] = offloading.device_bytes([quantization.quantize_weight(final, workload)])
        sizes[id(slot.tensor)] = by_shape[shape]
    return sizes


def _quantized(model: torch.nn.Module, workload: Workload) -> set[int]:
    """Weights that will be quantized, by identity."""
    return {id(linear.weight) for linear in quantization.quantizable(model, workload)}


def free_bytes(device: torch.device) -> int | None:
    """What this process can still allocate on a GPU; None for the host."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_host(
    model: torch.nn.Module, workload: Workload, inspection: Inspection | None, device: torch.device, num_resident: int
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
    model: torch.nn.Module, workload: Workload, inspection: Inspection | None, device: torch.device, num_resident: int
) -> int:
    """The host memory that a load will take as the process's own: all but what stays mapped from the files.

    Weights that are drawn come in the type the model was built in and stay until all are in place; a change of type
    or a quantization on the host makes another copy; an offloaded layer is packed into a buffer of its own.
    """
    sizes, dtype = tensor_bytes(model, workload), workload.weight_dtype
    waiting = encoder_layers(model)[num_resident:]
    waiting_modules = {id(module) for layer in waiting for module in layer.modules()}
    saved = {} if inspection is None else _saved_dtypes(inspection)
    quantized = _quantized(model, workload)
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
        if on_host and (id(slot.tensor) in quantized or before != (dtype if slot.is_cast else slot.tensor.dtype)):
            total += sizes[id(slot.tensor)]
    packed = _by_layer(waiting, sizes)
    return total + sum(packed) + (_slot_bytes(packed) if device.type == "cpu" else 0)


def _saved_dtypes(inspection: Inspection) -> dict[str, torch.dtype]:
    """Model name → the type its tensor is saved in."""
    entries = {entry.name: entry for entry in inspection.entries}
    found = {target: entries[name] for name, target in inspection.targets.items()} | dict(inspection.head.entries)
    return {
        target: getattr(torch, TORCH_DTYPES[entry.dtype])
        for target, entry in found.items()
        if entry.dtype in TORCH_DTYPES
    }


def _read_whole(inspection: Inspection) -> int:
    """Bytes of pickles that cannot be mapped: those older than torch 1.6 are no zip archives."""
    if inspection.files.kind != "bin":
        return 0
    old = {path for path in inspection.files.paths if not zipfile.is_zipfile(path)}
    return sum(entry.num_bytes for entry in inspection.entries if entry.file in old)


def available_bytes() -> int | None:
    """What the host can still give without swapping; None where the system does not say."""
    return kernel_bytes(MEMINFO, "MemAvailable")


def kernel_bytes(file: Path, field: str) -> int | None:
    """A field of a file of the kernel's, which counts in KiB; None where the system has none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)
