"""Where the weights come from: a folder that is inspected first, a snapshot from the hub, or nowhere (random)."""

from dataclasses import dataclass
from pathlib import Path

from vramfit.checkpoints.inspection import Inspection, inspect_checkpoint
from vramfit.errors import CheckpointError, WorkloadError
from vramfit.loader.request import LoadRequest
from vramfit.models.catalogue import find_entry
from vramfit.models.resolve import ResolvedModel, resolve

CONFIGURATION = ("config.json", "*.py", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.model")
SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
PICKLES = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")


@dataclass(frozen=True, slots=True)
class Origin:
    """A model that is known, and its inspected checkpoint; None for random weights."""

    resolved: ResolvedModel
    inspection: Inspection | None


def find_model(request: LoadRequest) -> ResolvedModel:
    """The model asked for; imports the code of its class.

    Raises:
        CheckpointError, UnknownModel, WorkloadError: as `models.resolve` raises them.
    """
    w = request.workload
    return resolve(request.model, task=w.task, num_labels=w.num_labels, trust_remote_code=request.trust_remote_code)


def find_origin(request: LoadRequest, resolved: ResolvedModel, *, scan: bool = False) -> Origin:
    """A model with its checkpoint inspected.

    Raises:
        CheckpointError: no weights, damaged ones, or ones that do not belong to the model; carries everything fatal.
        WorkloadError: nothing that has weights.
    """
    w = request.workload
    if resolved.module is not None:
        raise WorkloadError([f"{type(resolved.module).__name__} is a model already; load takes a folder or a name"])
    if request.random_weights:
        return Origin(resolved, None)
    if resolved.origin == "config":
        raise WorkloadError(["a configuration has no weights"], hint="pass random_weights=True, or a folder")
    if resolved.folder is None:
        folder = _snapshot(request, resolved)
        resolved = resolve(
            str(folder), task=w.task, num_labels=w.num_labels, trust_remote_code=request.trust_remote_code
        )
    inspection = inspect_checkpoint(resolved, scan=scan, num_labels=w.num_labels)
    _refuse(inspection)
    return Origin(resolved, inspection)


def _refuse(inspection: Inspection) -> None:
    """All fatal findings in one error; the hint is the first one's."""
    fatal = [finding for finding in inspection.findings if finding.fatal]
    if fatal:
        raise CheckpointError(
            "; ".join(finding.what for finding in fatal),
            file=str(inspection.files.paths[0]),
            hint=next((finding.fix for finding in fatal if finding.fix), None),
        )
    if inspection.converted:
        raise CheckpointError(
            f"{len(inspection.converted)} tensors ({inspection.converted[0]}, …) are saved in a form that transformers "
            "joins or splits on the way in, which a streaming load does not",
            file=str(inspection.files.paths[0]),
            tensor=inspection.converted[0],
            hint="load it once with from_pretrained and write it with save_pretrained; that form loads",
        )


def _snapshot(request: LoadRequest, resolved: ResolvedModel) -> Path:
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
    except Exception as error:  # the HTTP library behind huggingface_hub differs between its versions
        raise CheckpointError(
            f"{resolved.name} is a name, and its weights could not be fetched from the hub: {type(error).__name__}",
            hint="pass a folder with weights, or ask for random ones: --random-weights (random_weights=True)",
        ) from None
    return folder
