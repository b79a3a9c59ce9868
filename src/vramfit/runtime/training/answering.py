"""How a teacher answers in a run: beforehand, onto the disk, or from memory beside the student, in every pass.

Both give the same training. Kept answers cost one pass over the data and the disk; a held teacher takes memory, and
answers again in every epoch.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from vramfit.errors import NoPlanFits, WorkloadError
from vramfit.models.hub import exported_file
from vramfit.records.plan import Plan
from vramfit.runtime.trained import TrainedModel
from vramfit.runtime.training import events
from vramfit.runtime.training.answers import FOLDER, MANIFEST, num_answer_bytes
from vramfit.runtime.training.preparation import Run, batches_of, chosen_workload, num_steps
from vramfit.runtime.training.teacher import config_of, kinds_of
from vramfit.settings.distillation import DISK, MEMORY
from vramfit.units import format_bytes

DISK_BYTES_PER_S = 500 * 10**6
"""What a usual disk writes and reads; not measured."""
SHORT_S = 1.0
"""Answers that the disk takes and gives in so long are kept there: no plan is made to compare."""
Make = Callable[[bool], Plan | None]
"""Gives the plan of a run whose teacher is in memory, or not; None where none is made."""


def plan_answers(run: Run, teacher: TrainedModel, make: Make) -> Plan | None:
    """The plan of a run with its teacher where that is faster; `run.holds_teacher` says where.

    Raises:
        WorkloadError: a teacher is to be held that cannot be.
        NoPlanFits: neither fits.
    """
    asked = MEMORY if run.request.reads_relations else run.request.teacher_answers
    why_not = _why_not_held(run, teacher)
    if asked == MEMORY and why_not is not None:
        other = "take another --distill" if run.request.reads_relations else f"take teacher_answers {DISK}"
        raise WorkloadError([f"teacher_answers {MEMORY}: {why_not}"], hint=other)
    if asked in (DISK, MEMORY) or why_not is not None:
        run.holds_teacher = asked == MEMORY
        return make(run.holds_teacher)
    return _faster(run, teacher, make)


def _faster(run: Run, teacher: TrainedModel, make: Make) -> Plan | None:
    folder = Path(run.request.output)
    num_bytes = num_answer_bytes(kinds_of(run.request, teacher, run.data), run.data.train.lengths)
    has_begun = (folder / FOLDER / MANIFEST).exists()
    free_bytes = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    steps, of_all = (
        num_steps(run.request, run.data),
        -(-run.data.train.num_samples // batches_of(run.request, run.data)["batch"]),
    )
    disk_s = num_bytes / DISK_BYTES_PER_S * (1 + steps / of_all)
    if has_begun or (num_bytes <= free_bytes and steps >= of_all and disk_s < SHORT_S):
        return make(False)
    if num_bytes > free_bytes:
        text = f"Its answers would take {format_bytes(num_bytes)}, and the disk has {format_bytes(free_bytes)} free"
        return _held(run, make(True), text)
    kept = make(False)
    if kept is None:
        return _held(run, None, "The run does not see all samples") if steps < of_all else None
    try:
        held = make(True)
    except NoPlanFits:
        return kept
    assert held is not None
    of_teacher_s = held.step_time_s - kept.step_time_s  # for a batch; its answers to all are `of_all` of them
    kept_s = kept.step_time_s * steps + of_teacher_s * of_all + disk_s
    held_s = held.step_time_s * steps
    if kept_s <= held_s:
        return kept
    return _held(run, held, f"That takes about {held_s:,.0f} s, and keeping its answers on the disk {kept_s:,.0f} s")


def _held(run: Run, plan: Plan | None, why: str) -> Plan | None:
    run.holds_teacher = True
    run.on_event(events.Note(text=f"The teacher stays in memory and answers in every pass. {why}."))
    return plan


def _why_not_held(run: Run, teacher: TrainedModel) -> str | None:
    """Why a teacher cannot be in memory beside its student."""
    config, family = run.data.resolved.config, config_of(teacher).model_type
    if exported_file(teacher.model) is not None:
        return "the teacher is an exported file, which the CPU runs"
    if teacher.trust_remote_code:
        return "code of the model's own is not predicted with"
    if config.model_type != family:
        other = f"the teacher ({family}) is of another family than the student ({config.model_type})"
        return f"{other}, whose positions and token types it would read"
    try:
        chosen_workload(run.request, run.data, None, run.processes.size, holds_teacher=True)
    except WorkloadError as error:
        return error.problems[0].removeprefix("held_teacher: ")
    return None
