"""`make_model`: from a model without weights to one that has them, on its device; and what that took of memory."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vramfit.loader.budget import check_host, resident_layers
from vramfit.loader.filling import Filling, empty, initialise
from vramfit.loader.origin import Origin
from vramfit.loader.request import LoadRequest
from vramfit.loader.transfer import CheckpointTensors, ToHost, make_transfer
from vramfit.models.anatomy import encoder_layers
from vramfit.models.build import build_for
from vramfit.techniques import offloading, quantization

SAMPLED_FROM_BYTES = 2**20
"""Tensors after which the host's memory is looked at."""
STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A model with its weights, and what there is to say of them."""

    model: torch.nn.Module
    names: tuple[str, ...]
    """Everything its state holds."""
    num_tensors: int
    num_bytes: int
    largest_tensor_bytes: int
    num_quantized: int
    num_layers: int
    num_resident_layers: int


def make_model(
    request: LoadRequest,
    origin: Origin,
    device: torch.device,
    *,
    progress: Callable[[int, int], None],
    sample: Callable[[], None],
) -> Loaded:
    """The model asked for, on its device.

    Args:
        progress: called with bytes taken and bytes to take from the files.
        sample: called where the host's memory may be highest.

    Raises:
        NoPlanFits: the weights do not fit the device, or what the host holds of them not the host.
        CheckpointError: a file changed while it was read.
    """
    model = build_for(origin.resolved, request.workload)
    num_resident = resident_layers(request, model, device)
    check_host(model, request.workload, origin.inspection, device, num_resident)
    names = tuple(model.state_dict())
    try:
        with CheckpointTensors(origin.inspection) as tensors:
            fresh = names if origin.inspection is None else origin.inspection.fresh
            initialise(model, set(fresh), request.seed)
            filling = _filling(model, request, tensors, device, num_resident)
            filling.on_tensor = _count(tensors, progress, sample)
            filling.fill(model)
            offloading.apply(model, num_resident, device)
            filling.transfer.finish()
            if filling.quantized and device.type == "cuda":
                torch.cuda.empty_cache()  # what quantizing needed for a moment
            num_tensors, num_bytes = len(tensors), sum(map(tensors.num_bytes, tensors))
    except BaseException:
        empty(model)
        raise
    _dress(model, request, origin)
    return Loaded(
        model=model,
        names=names,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        largest_tensor_bytes=max(offloading.device_bytes([p]) for p in model.parameters()),
        num_quantized=len(filling.quantized),
        num_layers=len(encoder_layers(model)),
        num_resident_layers=num_resident,
    )


def _filling(
    model: torch.nn.Module, request: LoadRequest, tensors: CheckpointTensors, device: torch.device, num_resident: int
) -> Filling:
    """How the model is filled."""
    w = request.workload
    waiting = encoder_layers(model)[num_resident:]
    return Filling(
        tensors=tensors,
        dtype=w.weight_dtype,
        transfer=make_transfer(device),
        host=ToHost(torch.device("cpu")),
        quantize=w.quantize,
        quantized={id(linear) for linear in quantization.quantizable(model, w.quantize)},
        offloaded={id(module) for layer in waiting for module in layer.modules()},
    )


def _count(
    tensors: CheckpointTensors, progress: Callable[[int, int], None], sample: Callable[[], None]
) -> Callable[[str], None]:
    """What to call after each tensor."""
    total, done = sum(map(tensors.num_bytes, tensors)), 0
    progress(0, total)

    def count(name: str) -> None:
        nonlocal done
        num_bytes = tensors.num_bytes(name)
        done += num_bytes
        progress(done, total)
        if num_bytes >= SAMPLED_FROM_BYTES:
            sample()

    return count


def _dress(model: Any, request: LoadRequest, origin: Origin) -> None:
    """As `from_pretrained` leaves a model: in evaluation mode, and its configuration knows where it came from."""
    model.eval()
    folder = origin.resolved.folder
    model.config.name_or_path = str(folder) if folder is not None else origin.resolved.name
    model.config.dtype = request.workload.weight_dtype


class Gauge:
    """Reads memory from its making on; `sample` where the host's use may be highest."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._device = device if device.type == "cuda" else None
        self._allocated_before = 0
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._allocated_before = torch.cuda.memory_allocated(self._device)
        self._anonymous_before = anonymous_bytes()
        self._anonymous_peak = self._anonymous_before

    def sample(self) -> None:
        """Look at the host's memory now."""
        now = anonymous_bytes()
        if now is not None and self._anonymous_peak is not None:
            self._anonymous_peak = max(self._anonymous_peak, now)

    @property
    def peak_device_bytes(self) -> int | None:
        """The most that was allocated on the GPU beyond what was there before."""
        if self._device is None:
            return None
        return torch.cuda.max_memory_allocated(self._device) - self._allocated_before

    @property
    def device_bytes(self) -> int | None:
        """What is allocated on the GPU now beyond what was there before."""
        if self._device is None:
            return None
        return torch.cuda.memory_allocated(self._device) - self._allocated_before

    @property
    def host_anonymous_bytes(self) -> int | None:
        """The most that the process's own memory had grown, where it was sampled."""
        if self._anonymous_peak is None or self._anonymous_before is None:
            return None
        return self._anonymous_peak - self._anonymous_before


def anonymous_bytes() -> int | None:
    """Resident memory that no file backs; None where the system does not say."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), None)
