"""`Subject`: what a report is about, put together from the records that there are, and what it does not show."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vramfit.errors import VramfitError
from vramfit.records.codec import RecordError, from_data, from_json
from vramfit.records.estimate import Estimate, FitGrid
from vramfit.records.measurement import Comparison, ModelTable
from vramfit.records.plan import Plan
from vramfit.records.run import COURSE_FILE as COURSE
from vramfit.records.run import RunRecord, StepCourse
from vramfit.workload import Workload

RUN, PLAN, METRICS = "run.json", "plan.json", "metrics.jsonl"
NOT_PREDICTED = "batches and lengths were not predicted"
"""Begins the note that says why not."""
MAX_FILE_BYTES = 256 * 2**20
MAX_LINES = 200_000
HINT = "give the folder of a run, or JSON of an estimate, a plan, a measurement, a run or models compared"
KINDS: Mapping[str, tuple[type, frozenset[str]]] = {
    "Plan": (Plan, frozenset({"reasons", "alternatives", "budget_bytes"})),
    "RunRecord": (RunRecord, frozenset({"num_steps", "status"})),
    "Comparison": (Comparison, frozenset({"measurement", "differences"})),
    "ModelTable": (ModelTable, frozenset({"rows", "metric", "higher_is_better"})),
    "Estimate": (Estimate, frozenset({"phases", "breakdown"})),
}
"""Record → its class and fields that only it has, for JSON that does not name its record."""
EMULATED = "this run was on the emulated GPU, for which the CPU computes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Everything that a report may show; what is not there is left out."""

    source: str
    """Where it comes from, to show."""
    estimate: Estimate | None = None
    plan: Plan | None = None
    run: RunRecord | None = None
    metrics: tuple[Mapping[str, Any], ...] = ()
    """Lines of a run's journal."""
    course: StepCourse | None = None
    """A step that was recorded."""
    course_estimate: Estimate | None = None
    """The prediction of that very step."""
    comparison: Comparison | None = None
    models: ModelTable | None = None
    """Models side by side; a report of them is of nothing else."""
    grid: FitGrid | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def workload(self) -> Workload | None:
        """The job, where one is known."""
        if self.estimate is not None:
            return self.estimate.workload
        return self.comparison.measurement.workload if self.comparison is not None else None


def read_subject(path: Path) -> Subject:
    """What lies in a run's folder or in a file.

    Raises:
        VramfitError: nothing there that a report can be made of; says what is.
    """
    if path.is_dir():
        return _from_folder(path)
    if path.name == RUN and (path.parent / METRICS).exists():
        return _from_folder(path.parent)
    found = _record(path)
    shown = str(path)
    if isinstance(found, Plan):
        return Subject(source=shown, plan=found, estimate=found.estimate)
    if isinstance(found, Comparison):
        return Subject(source=shown, comparison=found, environment=_measured_with(found))
    if isinstance(found, ModelTable):
        return Subject(source=shown, models=found, environment=found.environment)
    if isinstance(found, RunRecord):
        return Subject(source=shown, run=found, environment=found.environment)
    assert isinstance(found, Estimate)
    return Subject(source=shown, estimate=found)


def _from_folder(folder: Path) -> Subject:
    if not any((folder / name).exists() for name in (RUN, PLAN, METRICS)):
        raise VramfitError(f"{folder} holds no run: neither {RUN} nor {PLAN} nor {METRICS} is there", hint=HINT)
    run = _expect(RunRecord, folder / RUN) if (folder / RUN).exists() else None
    plan = _expect(Plan, folder / PLAN) if (folder / PLAN).exists() else None
    course = _expect(StepCourse, folder / COURSE) if (folder / COURSE).exists() else None
    made = Subject(
        source=str(folder),
        run=run,
        plan=plan,
        estimate=plan.estimate if plan is not None else None,
        metrics=_lines(folder / METRICS),
        course=course,
        course_estimate=plan.estimate if plan is not None and course is not None and _is_of(course, plan) else None,
        environment=run.environment if run is not None else {},
    )
    unfinished = f"the run has not come to its end: {RUN} is not there yet"
    return made if run is not None else replace(made, notes=(unfinished,))


def _is_of(course: StepCourse, plan: Plan) -> bool:
    """Whether a recorded step has the very size that a plan is for."""
    return not course.lengths and (course.batch, course.micro_batch, course.seq) == (
        plan.workload.batch,
        plan.micro_batch,
        plan.workload.seq,
    )


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise VramfitError(f"{path} is too large for a record: {path.stat().st_size:,} bytes", hint=HINT)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not text"
        raise VramfitError(f"cannot read {path}: {what}", hint=HINT) from None


def _expect(cls: type, path: Path) -> Any:
    try:
        return from_json(cls, _text(path))
    except RecordError as error:
        raise VramfitError(f"{path}: {error}", hint=error.hint or HINT) from None


def _record(path: Path) -> Any:
    """The one record of a file, whether or not it says which it is."""
    try:
        data = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise VramfitError(f"{path} is not JSON: {error}", hint=HINT) from None
    if isinstance(data, list):
        if len(data) != 1:
            raise VramfitError(f"{path} holds {len(data)} records, and a report is about one", hint=HINT)
        data = data[0]
    if not isinstance(data, dict):
        raise VramfitError(f"{path} holds no record but {type(data).__name__}", hint=HINT)
    named = data.get("record")
    kind = named if named in KINDS else next((k for k, (_, fields) in KINDS.items() if fields <= set(data)), None)
    if kind is None:
        raise VramfitError(f"{path} is JSON, but no record that a report shows", hint=HINT)
    inside = {name: value for name, value in data.items() if name not in ("record", "schema_version")}
    try:
        return from_data(KINDS[kind][0], inside)
    except RecordError as error:
        raise VramfitError(f"{path}: {error}", hint=HINT) from None


def _lines(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The lines of a journal; one that a kill left half is left out."""
    if not path.exists():
        return ()
    found = []
    for line in _text(path).splitlines()[:MAX_LINES]:
        try:
            data = json.loads(line)
        except ValueError:
            continue
        if isinstance(data, dict) and isinstance(data.get("step"), int):
            found.append(data)
    return tuple(found)


def _measured_with(comparison: Comparison) -> dict[str, str]:
    m = comparison.measurement
    driver = {} if m.driver_version is None else {"driver": m.driver_version}
    return {"gpu": m.gpu, "torch": m.torch_version, "transformers": m.transformers_version, **driver}


def reasons_of(subject: Subject) -> Iterator[str]:
    """A sentence for every part that is left out."""
    if subject.models is not None:
        return
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
        yield "No scores: the run was not evaluated during training (train with --eval-data)."
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
