"""`check_model`: one model before it is loaded: its configuration, its files, its tokenizer, the GPU at hand."""

from dataclasses import replace
from pathlib import Path

from vramfit.checkpoints import cached_snapshot, inspect_checkpoint, inspect_config
from vramfit.devices.probe import probe
from vramfit.errors import CheckpointError
from vramfit.models import ResolvedModel, find_entry, resolve
from vramfit.records.finding import Finding
from vramfit.tasks import DEFAULT


def check_model(
    model: str | Path,
    *,
    task: str = DEFAULT,
    scan: bool = False,
    num_labels: int | None = None,
    gpu_free_bytes: int | None = None,
) -> list[Finding]:
    """All findings about a model, gravest first; loads no weights.

    Args:
        model: a folder, a catalogue name or a hub id.
        task: the head that is wanted.
        scan: read the data too, for NaN, infinite and all-zero tensors.
        num_labels: size of the head wanted; None keeps the configuration's.
        gpu_free_bytes: free memory to compare with; None asks the first GPU of this machine.

    Raises:
        UnknownModel, WorkloadError: nothing goes by that name, or it has no head for the task.
    """
    free_bytes = gpu_free_bytes if gpu_free_bytes is not None else _free_bytes()
    try:
        resolved = resolve(model, task=task, num_labels=num_labels)
        folder = resolved.folder or _cached(resolved)
        if folder is None:
            return [*inspect_config(resolved, gpu_free_bytes=free_bytes), _no_weights(resolved)]
        found = replace(resolved, folder=folder)
        return list(inspect_checkpoint(found, scan=scan, gpu_free_bytes=free_bytes, num_labels=num_labels).findings)
    except CheckpointError as error:
        return [finding_of(error)]


def finding_of(error: CheckpointError) -> Finding:
    """What a damaged checkpoint has to say, as the finding it is."""
    return Finding(
        check="checkpoint.damaged",
        severity="error",
        what=str(error),
        why="nothing can be loaded from it" + (f"; the first fault is at {error.tensor[:80]}" if error.tensor else ""),
        fix=error.hint or "",
        fatal=True,
    )


def _cached(resolved: ResolvedModel) -> Path | None:
    entry = find_entry(resolved.name)
    return cached_snapshot(entry.hub_id if entry is not None else resolved.name)


def _no_weights(resolved: ResolvedModel) -> Finding:
    entry = find_entry(resolved.name)
    hub_id = entry.hub_id if entry is not None else resolved.name
    return Finding(
        check="weights.absent",
        severity="info",
        what=f"no weights of {resolved.name} on this machine: only the configuration was checked",
        why="predicting and planning need none",
        fix=f"hf download {hub_id}, then run this again",
    )


def _free_bytes() -> int | None:
    gpus = probe()
    return gpus[0].free_bytes if gpus else None
