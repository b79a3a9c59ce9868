"""`find_origin` and `make_model`: from a request to a checkpoint that is inspected, to a model that has its weights."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from vramfit.checkpoints.inspection import Inspection, inspect_checkpoint
from vramfit.errors import CheckpointError, WorkloadError
from vramfit.loader.budget import check_host, kernel_bytes, resident_layers
from vramfit.loader.filling import CheckpointTensors, Filling, empty, initialise
from vramfit.loader.load import LoadRequest, Progress
from vramfit.models.anatomy import encoder_layers
from vramfit.models.build import build_for
from vramfit.models.catalogue import find_entry
from vramfit.models.resolve import ResolvedModel
from vramfit.records.finding import LoadReport
from vramfit.settings import having
from vramfit.tasks.parts.pooling import head_of
from vramfit.techniques import offloading

CONFIGURATION = (
    *("config.json", "*.py", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.model"),
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json"),
    "?_*/config.json",
)
SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
PICKLES = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")
DENSE_PICKLES = ("?_Dense/pytorch_model.bin",)
SAMPLED_FROM_BYTES = 2**20
"""Tensors after which the host's memory is looked at."""
STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Origin:
    """A model that is known, and its inspected checkpoint; None for random weights."""

    resolved: ResolvedModel
    inspection: Inspection | None


def find_origin(request: LoadRequest, resolved: ResolvedModel, *, scan: bool = False) -> Origin:
    """A model with its checkpoint inspected.

    Raises:
        CheckpointError: no weights, damaged ones, or ones that do not belong to the model; carries everything fatal.
        WorkloadError: nothing that has weights.
    """
    if resolved.module is not None:
        raise WorkloadError([f"{type(resolved.module).__name__} is a model already; load takes a folder or a name"])
    if request.random_weights:
        return Origin(resolved, None)
    if resolved.origin == "config":
        raise WorkloadError(["a configuration has no weights"], hint="pass random_weights=True, or a folder")
    if resolved.folder is None:
        resolved = request.resolve(str(_snapshot(resolved)))
    inspection = inspect_checkpoint(resolved, scan=scan, num_labels=request.workload.num_labels)
    _refuse(inspection)
    return Origin(resolved, inspection)


def _refuse(inspection: Inspection) -> None:
    """Raises CheckpointError for everything fatal, and for tensors that are not saved as the model has them."""
    inspection.check()
    if inspection.converted:
        raise CheckpointError(
            f"{len(inspection.converted)} tensors ({inspection.converted[0]}, …) are saved in a form that transformers "
            "joins or splits while loading, which a streaming load does not",
            file=str(inspection.files.paths[0]),
            tensor=inspection.converted[0],
            hint="load it once with from_pretrained and write it with save_pretrained(…, save_original_format=False)",
        )


def _snapshot(resolved: ResolvedModel) -> Path:
    """The folder of a hub id: configuration and safetensors only, `.bin` files only where there is nothing else.

    Raises:
        CheckpointError: the hub cannot be reached and has left nothing here, or has no weights of that name.
    """
    from huggingface_hub import snapshot_download

    entry = find_entry(resolved.name)
    hub_id = entry.hub_id if entry is not None else resolved.name
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=[*CONFIGURATION, *SAFETENSORS]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(hub_id, allow_patterns=[*CONFIGURATION, *PICKLES]))
        if any(not (part / "model.safetensors").exists() for part in folder.glob("?_Dense")):
            folder = Path(snapshot_download(hub_id, allow_patterns=[*CONFIGURATION, *DENSE_PICKLES]))
    except Exception as error:  # the HTTP library behind huggingface_hub differs between its versions
        raise CheckpointError(
            f"{resolved.name} is a name, and its weights could not be fetched from the hub: {type(error).__name__}",
            hint="pass a folder with weights, or ask for random ones: --random-weights (random_weights=True)",
        ) from None
    return folder


def make_model(
    request: LoadRequest, origin: Origin, device: torch.device, *, progress: Progress | None = None
) -> tuple[torch.nn.Module, LoadReport]:
    """The model asked for, on its device, in evaluation mode; and what making it took, but for the time.

    Args:
        progress: called with bytes taken and bytes to take from the files.

    Raises:
        NoPlanFits: the weights do not fit the device, or what the host holds of them not the host.
        CheckpointError: a file changed while it was read.
    """
    gauge, w, inspection = Gauge(device), request.workload, origin.inspection
    model: Any = build_for(origin.resolved, w)
    if w.pooling is not None and (head := head_of(model)) is not None:
        head.pool_by(w.pooling)
    num_resident = resident_layers(request, model, device)
    check_host(model, w, inspection, device, num_resident)
    fresh = tuple(model.state_dict()) if inspection is None else tuple(inspection.fresh)
    try:
        with CheckpointTensors(inspection) as tensors:
            initialise(model, set(fresh), request.seed)
            filling = Filling(model, w, tensors, device, num_resident)
            filling.fill(model, _count(tensors, progress, gauge.sample))
            offloading.apply(model, num_resident, device)
            filling.transfer.finish()
            if filling.quantized and device.type == "cuda":
                torch.cuda.empty_cache()  # what quantizing needed for a moment
            num_tensors, num_bytes = len(tensors), sum(map(tensors.num_bytes, tensors))
    except BaseException:
        empty(model)
        raise
    model.eval()
    model.config.name_or_path = str(origin.resolved.folder or origin.resolved.name)  # as `from_pretrained` leaves it
    model.config.dtype = w.weight_dtype
    gauge.sample()
    final_bytes, peak_bytes = gauge.device_bytes
    return model, LoadReport(
        model=origin.resolved.name,
        model_class=type(model).__name__,
        task=origin.resolved.task,
        device=str(device),
        **{f.name: getattr(w, f.name) for f in fields(LoadReport) if f.name in having(of_weights=True)},
        num_quantized=len(filling.quantized),
        files=() if inspection is None else _names(inspection),
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        time_s=0.0,
        final_device_bytes=final_bytes,
        peak_device_bytes=peak_bytes,
        largest_tensor_bytes=max(offloading.device_bytes([p]) for p in model.parameters()),
        host_anonymous_bytes=gauge.host_anonymous_bytes,
        num_layers=len(encoder_layers(model)),
        num_resident_layers=num_resident,
        fresh=fresh,
        dropped=() if inspection is None else tuple(inspection.unexpected),
        renamed={} if inspection is None else dict(inspection.renamed),
        findings=() if inspection is None else tuple(inspection.findings),
    )


def _names(inspection: Inspection) -> tuple[str, ...]:
    """Files of weights; those of a head with their folder."""
    of_head = [f"{path.parent.name}/{path.name}" for files in inspection.head.files for path in files.paths]
    return (*(path.name for path in inspection.files.paths), *of_head)


def _count(tensors: CheckpointTensors, progress: Progress | None, sample: Callable[[], None]) -> Callable[[str], None]:
    """What to call after each tensor."""
    total, done = sum(map(tensors.num_bytes, tensors)), 0
    tell_progress = progress or (lambda num_bytes_done, num_bytes: None)
    tell_progress(0, total)

    def count(name: str) -> None:
        nonlocal done
        num_bytes = tensors.num_bytes(name)
        done += num_bytes
        tell_progress(done, total)
        if num_bytes >= SAMPLED_FROM_BYTES:
            sample()

    return count


class Gauge:
    """Reads memory from its making on; `sample` where the host's use may be highest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._allocated_before = 0
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._allocated_before = torch.cuda.memory_allocated(self._device)
        self._anonymous_before = anonymous_bytes()
        self._anonymous_peak = self._anonymous_before or 0

    def sample(self) -> None:
        """Look at the host's memory now."""
        self._anonymous_peak = max(self._anonymous_peak, anonymous_bytes() or 0)

    @property
    def device_bytes(self) -> tuple[int | None, int | None]:
        """What is allocated on the GPU beyond what was there before, now and at the most; None elsewhere."""
        if self._device is None:
            return None, None
        now, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        return now - self._allocated_before, peak - self._allocated_before

    @property
    def host_anonymous_bytes(self) -> int | None:
        """The most that the process's own memory had grown, where it was sampled."""
        return None if self._anonymous_before is None else self._anonymous_peak - self._anonymous_before


def anonymous_bytes() -> int | None:
    """Resident memory that no file backs; None where the system does not say."""
    return kernel_bytes(STATUS, "RssAnon")
