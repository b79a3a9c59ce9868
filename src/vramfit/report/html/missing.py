"""What a report does not show, and why."""

from collections.abc import Iterator, Mapping
from typing import Any

from vramfit.report.html.subject import METRICS, NOT_PREDICTED, PLAN, Subject

EMULATED = "this run was on the emulated GPU, for which the CPU computes"


def reasons_of(subject: Subject) -> Iterator[str]:
    """A sentence for every part that is left out."""
    if subject.run is not None or subject.metrics:
        yield from _of_run(subject)
    estimate = subject.estimate
    if estimate is not None and estimate.step_time_s is None and subject.run is None:
        why = "no GPU was named" if estimate.gpu is None else "the speed of this GPU is not known"
        yield f"No time of a step: {why}."
    if subject.workload is None:
        yield f"No predicted step and no map of what fits: there is no {PLAN} in the folder of the run."
    elif subject.grid is None and not any(NOT_PREDICTED in note for note in subject.notes):
        yield "No map of what fits by batch and length: it was not asked for (--no-grid)."
    if subject.plan is not None and not subject.plan.alternatives:
        yield "No other settings: none were predicted for this plan."


def _of_run(subject: Subject) -> Iterator[str]:
    run = subject.run
    if not subject.metrics:
        yield f"No curves of loss and throughput: {METRICS}, which a run writes step by step, is not there."
    device = "" if run is None else run.device
    if device == "emulated":
        yield f"No step times and no throughput: {EMULATED}."
    elif run is not None and run.step_time_s is None:
        yield "No step times: the run took no step."
    if run is not None and not run.evaluations:
        yield "No scores: the run was not evaluated on the way (train with --eval-data)."
    if device == "cpu":
        yield "No reserved memory: this run was on the CPU, which has no allocator that could be asked."
    if subject.course is None and run is not None and subject.workload is not None:
        yield f"No measured step over the predicted one: {_why_no_course(device, run.settings)}."
    elif subject.course is not None and subject.course_estimate is None:
        yield "No measured step over the predicted one: the recorded step has another size, and was not predicted."


def _why_no_course(device: str, settings: Mapping[str, Any]) -> str:
    if device == "cpu":
        return "this run was on the CPU"
    if settings.get("graphs"):
        return "the passes of this run were CUDA graphs, which request nothing"
    return "no step was recorded"
