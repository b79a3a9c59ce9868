"""Whether a model's weights fit, before the first of them moves; and how many layers stay on the device."""

import torch

from vramfit.errors import NoPlanFits, WorkloadError
from vramfit.loader.request import LoadRequest
from vramfit.models.anatomy import encoder_layers
from vramfit.models.build import build_meta
from vramfit.models.resolve import ResolvedModel
from vramfit.techniques import offloading, precision, quantization
from vramfit.units import format_bytes


def resident_layers(request: LoadRequest, resolved: ResolvedModel, device: torch.device) -> int:
    """How many layers are to stay on the device; all of them unless the request offloads.

    Raises:
        NoPlanFits: the weights do not fit; says by how much, and what would help.
        WorkloadError: an offload without anything to fit into.
    """
    w = request.workload
    model = build_meta(resolved, attention=w.attention)
    num_layers = len(encoder_layers(model))
    budget_bytes = w.memory if w.memory is not None else free_bytes(device)
    if budget_bytes is None:
        if request.offloads:
            raise WorkloadError(["offload weights needs memory on a device that does not say what is free"])
        return num_layers
    precision.apply(model, w.precision)
    quantization.apply(model, w.quantize)
    if request.offloads:
        return offloading.num_resident_layers(model, budget_bytes)
    needed_bytes = offloading.model_bytes(model)
    if needed_bytes > budget_bytes:
        raise NoPlanFits(
            f"the weights of {resolved.name} take {format_bytes(needed_bytes)} in {_words(request)}, and "
            f"{format_bytes(budget_bytes)} {'are allowed' if w.memory is not None else f'are free on {device}'}",
            shortfall_bytes=needed_bytes - budget_bytes,
            hint="offload weights keeps layers on the host; precision bf16 halves them, quantize int8 takes a quarter",
        )
    return num_layers


def free_bytes(device: torch.device) -> int | None:
    """What this process can still allocate on a GPU; None for the host."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _words(request: LoadRequest) -> str:
    w = request.workload
    return w.precision if w.quantize is None else f"{w.precision} with {w.quantize} linear layers"
