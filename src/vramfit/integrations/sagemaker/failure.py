"""Why a job failed, in one sentence for SageMaker's page; where memory was short, with the instance that would do."""

from pathlib import Path
from typing import Any

from vramfit.devices.catalogue import find_instance
from vramfit.errors import NoPlanFits, RecoveryExhausted, UnknownGPU, VramfitError
from vramfit.integrations.sagemaker.job import Job
from vramfit.records.plan import InstanceFit
from vramfit.runtime.training.request import DEFAULT_BATCH, TrainRequest
from vramfit.units import format_bytes

MAX_CHARACTERS = 1024
"""SageMaker shows no more."""


def reason_of(error: BaseException, job: Job | None, request: TrainRequest | None) -> str:
    """The sentence."""
    if not isinstance(error, VramfitError):
        return _one_line(f"unexpected {type(error).__name__}: {error} (a bug in vramfit; the log has the traceback)")
    hint = error.hint
    if isinstance(error, NoPlanFits | RecoveryExhausted) and request is not None:
        fit = _larger_instance(error, job, request)
        if fit is not None and fit.safe_reserved_bytes is not None:
            hint = (
                f"{fit.instance} would do: {format_bytes(fit.safe_reserved_bytes)} of {format_bytes(fit.budget_bytes)} "
                f"({fit.gpu}, {fit.settings}); or {hint}"
            )
    return _one_line(f"{error}; {hint}" if hint else str(error))


def _larger_instance(error: VramfitError, job: Job | None, request: TrainRequest) -> InstanceFit | None:
    """The smallest instance whose GPU is larger than this one's, and on which the job has a plan."""
    from vramfit.planner.elsewhere import smallest_instance

    best: Any = getattr(error, "best", None)
    settings = {name: value for name, value in request.settings().items() if name not in ("micro_batch", "host_memory")}
    if best is not None:
        settings["seq"] = best.workload.seq
        if best.workload.num_labels is not None:
            settings["num_labels"] = best.workload.num_labels
    try:
        here = find_instance(job.instance).gpu if job is not None and job.instance else None
    except UnknownGPU:
        here = None
    try:
        return smallest_instance(
            request.model, larger_than=here, batch=request.batch or DEFAULT_BATCH, allow=request.allow, **settings
        )
    except VramfitError:
        return None


def write_failure(folder: Path, reason: str) -> None:
    """Leave the sentence where SageMaker looks for it; a folder that cannot be written is only said."""
    file = folder / "failure"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(reason, encoding="utf-8")
    except OSError as error:
        print(f"cannot write {file}: {error.strerror}", flush=True)


def _one_line(text: str) -> str:
    made = " ".join(text.split())
    return made if len(made) <= MAX_CHARACTERS else f"{made[: MAX_CHARACTERS - 1]}…"
