"""Whether a model's weights fit, before the first of them moves; and how many layers stay on the device."""

from dataclasses import replace
from typing import Any

import torch

from vramfit.errors import MissingExtra, NoPlanFits, WorkloadError
from vramfit.loader.request import LoadRequest
from vramfit.loader.walk import tensor_slots
from vramfit.models.anatomy import encoder_layers
from vramfit.techniques import offloading, precision, quantization
from vramfit.units import format_bytes
from vramfit.workload import Workload

ACTIVATIONS = 4
"""One part in four of a GPU's free memory is left to activations where layers are offloaded and no memory is given."""


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
        by_layer = [sum(sizes[id(p)] for p in layer.parameters()) for layer in layers]
        return offloading.choose_resident(total, by_layer, budget_bytes)
    raise NoPlanFits(
        f"the weights of {w.model} take {format_bytes(total)} in {_words(w)}, and {format_bytes(budget_bytes)} "
        f"{'are allowed' if w.memory is not None else f'are free on {device}'}",
        shortfall_bytes=total - budget_bytes,
        hint=_less(model, w, total),
    )


def _less(model: torch.nn.Module, w: Workload, total_bytes: int) -> str:
    """What the weights would take otherwise, in figures of this model."""
    changes: dict[str, dict[str, Any]] = {
        "in precision bf16": {"precision": "bf16"},
        "with quantize int8": {"quantize": "int8"},
        "with both": {"precision": "bf16", "quantize": "int8"},
    }
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
    layers = [sum(sizes[id(p)] for p in layer.parameters()) for layer in encoder_layers(model)]
    slots = min(offloading.NUM_SLOTS, len(layers)) * max(layers, default=0)
    return sum(sizes.values()) - sum(layers) + slots


def tensor_bytes(model: torch.nn.Module, workload: Workload) -> dict[int, int]:
    """What each tensor of a model will take on the device, by identity, in the precision of a workload."""
    dtype, quantize = precision.weight_dtype(workload.precision), workload.quantize
    linears = quantization.quantizable(model, quantize) if quantize is not None else []
    quantized = {id(linear.weight) for linear in linears}
    by_shape: dict[tuple[int, ...], int] = {}
    sizes = {}
    for slot in tensor_slots(model):
        casts = slot.tensor.is_floating_point() and not slot.is_computed
        final = torch.empty_like(slot.tensor, dtype=dtype if casts else None)
        shape = tuple(final.shape)
        if quantize is None or id(slot.tensor) not in quantized:
            sizes[id(slot.tensor)] = offloading.device_bytes([final])
            continue
        if shape not in by_shape:
            by_shape[shape] = offloading.device_bytes([quantization.quantize_weight(final, quantize)])
        sizes[id(slot.tensor)] = by_shape[shape]
    return sizes


def free_bytes(device: torch.device) -> int | None:
    """What this process can still allocate on a GPU; None for the host."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _words(w: Workload) -> str:
    return w.precision if w.quantize is None else f"{w.precision} with {w.quantize} linear layers"
