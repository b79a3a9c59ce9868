"""A plan that was given as a file: whether it is for this job and this model, and how it suits the device."""

from dataclasses import replace
from typing import Any

from vramfit.errors import VramfitError, WorkloadError
from vramfit.models.configuration import SIZE_LIMITS
from vramfit.models.resolve import resolve
from vramfit.records.plan import Plan
from vramfit.runtime.training import events
from vramfit.runtime.training.place import Place
from vramfit.runtime.training.request import TrainRequest
from vramfit.settings import PLANNED
from vramfit.workload import Workload

HALF = ("amp-fp16", "amp-bf16", "fp16", "bf16")
SIZES = ("model_type", *(name for name in SIZE_LIMITS if name != "num_labels"))
"""What makes a model take what it takes; the labels are the data's."""
NUM_NAMED = 3
"""Sizes that are named where models differ."""


def saved_plan(request: TrainRequest, on_event: events.OnEvent) -> Plan | None:
    """The plan that was given.

    Raises:
        VramfitError: the file is no plan.
        WorkloadError: a plan for another job, or for a model of other sizes.
    """
    if request.plan is None:
        return None
    try:
        plan = Plan.load(request.plan)
    except VramfitError as error:
        raise VramfitError(f"the plan {request.plan}: {error}", hint="vramfit plan --save FILE writes one") from None
    w = plan.workload
    problems = []
    if w.task != request.task:
        problems.append(f"the plan is for task {w.task}, not {request.task}")
    if request.batch is not None and w.batch != request.batch:
        problems.append(f"the plan is for batch {w.batch}, not {request.batch}")
    problems += _other_settings(request, w)
    other = _other_model(request, plan, on_event)
    if problems or other:
        anew = f"plan for it: vramfit plan {request.model} --save FILE, with the budget and the batch"
        hint = anew if other else "plan anew, or leave out what the plan says already"
        raise WorkloadError([*problems, *other], hint=hint)
    return plan


def _other_settings(request: TrainRequest, planned: Workload) -> list[str]:
    """Settings that were given beside the plan, and that it has otherwise."""
    given = request.settings() | ({} if request.graphs is None else {"graphs": request.graphs})
    pairs = [(name, _words(getattr(planned, name)), _words(given[name])) for name in PLANNED if name in given]
    return [f"the plan says {name} {says}, not {asked}" for name, says, asked in pairs if says != asked]


def _words(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _other_model(request: TrainRequest, plan: Plan, on_event: events.OnEvent) -> list[str]:
    """How the plan's model differs from the one that is to be trained; what cannot be compared is said."""
    planned = plan.workload.model
    if planned == request.model:
        return []
    own = resolve(request.model, task=request.task, trust_remote_code=request.trust_remote_code)
    try:
        other = resolve(planned, task=request.task, trust_remote_code=request.trust_remote_code)
    except VramfitError:
        text = f"The plan is for {planned}, which is not here: is it as large as {request.model}?"
        on_event(events.Note(text=text, warns=True))
        return []
    different = [name for name in SIZES if _size(own.config, name) != _size(other.config, name)][:NUM_NAMED]
    if not different:
        return []
    sizes = (", ".join(f"{name} {_size(r.config, name)}" for name in different) for r in (other, own))
    return [f"the plan is for {planned} ({next(sizes)}), not {request.model} ({next(sizes)})"]


def _size(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def suited(plan: Plan, place: Place, gpu: str | None, on_event: events.OnEvent) -> Plan:
    """A plan as it can be run at a place; what was meant for another one is said.

    Args:
        gpu: the catalogue's name of the GPU that is there.
    """
    w = plan.workload
    half = w.precision in HALF
    if place.name == "cpu" and half:
        text = f"The plan says {w.precision}, which is slow on a CPU: fp32 is taken."
        on_event(events.Note(text=text, warns=True))
        return replace(plan, workload=replace(w, precision="fp32", graphs=False, fused=False))
    if place.emulated is not None and half:
        text = f"The plan says {w.precision}, which is slow here: the emulated GPU computes on the CPU."
        on_event(events.Note(text=text, warns=True))
    if gpu is not None and w.gpu is not None and gpu != w.gpu:
        text = f"The plan is for {w.gpu}, and this is {gpu}: memory and times may differ."
        on_event(events.Note(text=text, warns=True))
    return plan
