"""What the API answers: records with what the page says of them, as models that its OpenAPI page documents."""

import ast
import inspect
import shlex
from dataclasses import fields
from itertools import pairwise
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from vramfit.devices.catalogue import GPU, find_gpu
from vramfit.errors import NoPlanFits, VramfitError, WorkloadError
from vramfit.models.catalogue import CatalogueEntry, find_entry, unknown_model
from vramfit.records.codec import to_data
from vramfit.records.estimate import Estimate, MaxBatch, TensorGroup
from vramfit.records.plan import Plan, Reason
from vramfit.report.plan import estimate_command, split_words, train_command
from vramfit.report.words import KIND_WORDS, Tone, group_name, peak_moment, verdict_of
from vramfit.settings import having
from vramfit.tasks import find_task
from vramfit.web.queries import EstimateQuery, JobQuery, MaxBatchQuery, PlanQuery, Query, keywords_of
from vramfit.workload import Workload

NUM_LARGEST = 12
OK, REFUSED, BROKEN = 200, 422, 500


class Answer(BaseModel):
    """Base of all answers: nothing that is not documented."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)


def fields_of(record: type, *only: str, without: tuple[str, ...] = (), also: tuple[str, ...] = ()) -> type[Answer]:
    """A model with fields of a record, each with what stands below it there.

    Args:
        only: these alone; all fields unless given.
        without: fields to leave out.
        also: properties that are fields of the answer.
    """
    hints, about = get_type_hints(record), _docstrings(record)
    names = only or tuple(f.name for f in fields(record) if f.name not in without)
    found: dict[str, Any] = {name: (hints[name], Field(description=about.get(name))) for name in names}
    for name in also:
        getter = getattr(record, name).fget
        found[name] = (get_type_hints(getter)["return"], Field(description=inspect.getdoc(getter)))
    return create_model(f"{record.__name__}Fields", __base__=Answer, **found)


def _docstrings(record: type) -> dict[str, str]:
    """Field → the text below it."""
    body = ast.parse(inspect.getsource(record)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


class Problem(Answer):
    """Why there is no answer, in sentences."""

    error: str
    """What is wrong, with numbers."""
    hint: str | None = None
    """What to do about it."""
    problems: list[str] = []
    """Every problem, where there are several."""


class Held(fields_of(TensorGroup)):  # type: ignore[misc]
    """Like blocks that are live at the peak."""

    what: str


class EstimateAnswer(fields_of(Estimate, without=("workload", "peak", "modules", "groups", "snapshot"))):  # type: ignore[misc]
    """What a job takes; requested ≤ allocated ≤ reserved ≤ process."""

    settings: dict[str, Any] = Field(description="The workload as it was understood.")
    tone: Tone
    headline: str
    details: tuple[str, ...]
    peak: str = Field(description="When the peak comes, in words.")
    peak_part: str = Field(description="The part of the step that it comes in: forward, backward, optimizer, …")
    largest: tuple[Held, ...]
    samples_per_s: float | None
    command: str = Field(description="The same on the command line.")


class MaxBatchAnswer(fields_of(MaxBatch, without=("estimate",))):  # type: ignore[misc]
    """The largest batch that fits a GPU."""

    gpu: str | None
    title: str
    capacity_bytes: int
    safe_reserved_bytes: int


class ReasonAnswer(fields_of(Reason)):  # type: ignore[misc]
    """One setting of a plan, and why."""

    kind_in_words: str


class Commands(Answer):
    """What to type."""

    plan: str
    train: str | None = Field(description="None for a task that `vramfit train` does not have.")
    estimate: str


class FoundPlan(
    fields_of(  # type: ignore[misc]
        Plan,
        without=("workload", "estimate", "evaluation", "lengths", "reasons"),
        also=("micro_batch", "accumulate", "evaluation_batch", "most_reserved_bytes"),
    )
):
    """Settings that fit."""

    settings: dict[str, Any]
    samples_per_s: float
    safe_reserved_bytes: int
    headline: str
    reasons: tuple[ReasonAnswer, ...]
    commands: Commands


class MissingPlan(fields_of(NoPlanFits, "shortfall_bytes", "allow", "gpu", "model")):  # type: ignore[misc]
    """Why nothing that is allowed fits, and what would."""

    error: str
    hint: str | None


class PlanAnswer(Answer):
    """A plan, or why there is none."""

    found: FoundPlan | None
    missing: MissingPlan | None


class ModelEntry(fields_of(CatalogueEntry, "name", "family", "num_parameters", "num_layers", "max_positions")):  # type: ignore[misc]
    """A model of the catalogue."""


class GPUEntry(fields_of(GPU, "name", "title", "kind", "total_memory_bytes", also=("supports_bf16",))):  # type: ignore[misc]
    """A GPU of the catalogue."""


class SettingEntry(Answer):
    """A setting that the page has a control for."""

    keyword: str
    label: str
    about: str
    values: list[str]
    labels: dict[str, str] = Field(description="Value → how the page calls it; an empty one stands for none.")
    modes: list[str] = Field(description="Modes in which it does something.")
    is_basic: bool
    hidden: bool = Field(description="Whether the page keeps it without a control: a plan may have it.")


class CatalogueAnswer(Answer):
    """Everything there is to choose from."""

    version: str
    torch_version: str
    models: list[ModelEntry]
    gpus: list[GPUEntry]
    row_of_gpus: list[str]
    choices: dict[str, list[str]]
    settings: list[SettingEntry]
    allowable: dict[str, str] = Field(description="What a plan may be allowed to change → what that means.")
    defaults: dict[str, Any] = Field(description="Of the parameters of an estimate.")
    parameters: dict[str, list[str]] = Field(description="Path of the API → the parameters it takes.")
    batch_stops: list[int]
    seq_stops: list[int]
    max_batch: int
    max_seq: int
    allow_local: bool = Field(description="Whether folders and hub ids may be named as models.")


def answer(query: Query, *, allow_local: bool = False) -> tuple[int, bytes]:
    """Status and JSON text for one query; what is wrong with it is an answer too. Runs inside a worker process."""
    try:
        ways: dict[type, Any] = {EstimateQuery: estimated, MaxBatchQuery: largest, PlanQuery: planned}
        made: Answer = ways[type(query)](query, allow_local)
    except VramfitError as error:
        return REFUSED, problem(error).model_dump_json().encode()
    except Exception as error:  # a bug: the server lives on and says so
        text = f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return BROKEN, Problem(error=text, hint="this is a bug in vramfit").model_dump_json().encode()
    return OK, made.model_dump_json().encode()


def problem(error: VramfitError) -> Problem:
    """An error as an answer."""
    problems = list(error.problems) if isinstance(error, WorkloadError) else []
    return Problem(error=str(error), hint=error.hint, problems=problems)


def model_of(query: JobQuery, allow_local: bool) -> Any:
    """What `estimate` takes as the model: a configuration of the catalogue, so that no path and no hub is looked at.

    Raises:
        UnknownModel: not in the catalogue, and nothing else may be named.
    """
    if allow_local:
        return query.model
    from vramfit.models.configuration import make_config

    entry = find_entry(query.model)
    if entry is None:
        raise unknown_model(query.model, because="only the catalogue's models; --allow-local takes others")
    config = make_config(entry.config_data(), where=entry.name)
    config.name_or_path = entry.name
    return config


def estimated(query: EstimateQuery, allow_local: bool) -> EstimateAnswer:
    """What a job takes."""
    from vramfit.estimator.predict import estimate

    e = estimate(model_of(query, allow_local), **keywords_of(query))
    verdict = verdict_of(e)
    return EstimateAnswer(
        **_shared(EstimateAnswer, e)
        | {
            "torch_version": e.torch_version.partition("+")[0],
            "settings": settings_of(e.workload),
            "tone": verdict.tone,
            "headline": verdict.headline,
            "details": verdict.details,
            "peak": peak_moment(e.peak, e.workload),
            "peak_part": e.peak.part,
            "largest": [Held(**_shared(Held, g), what=group_name(g)) for g in e.groups[:NUM_LARGEST]],
            "samples_per_s": e.workload.batch / e.step_time_s if e.step_time_s else None,
            "command": command_of("estimate", query),
        }
    )


def largest(query: MaxBatchQuery, allow_local: bool) -> MaxBatchAnswer:
    """The largest batch that fits."""
    from vramfit.planner.choose import max_batch

    found = max_batch(model_of(query, allow_local), **keywords_of(query))
    e = found.estimate
    return MaxBatchAnswer(
        **_shared(MaxBatchAnswer, found),
        gpu=e.gpu,
        title=find_gpu(e.gpu).title if e.gpu is not None else str(query.memory),
        capacity_bytes=e.capacity_bytes,
        safe_reserved_bytes=e.safe_reserved_bytes,
    )


def planned(query: PlanQuery, allow_local: bool) -> PlanAnswer:
    """A plan, or why there is none."""
    from vramfit.planner.plan import plan

    try:
        p = plan(model_of(query, allow_local), **keywords_of(query))
    except NoPlanFits as error:
        return PlanAnswer(found=None, missing=MissingPlan(**_shared(MissingPlan, error), error=str(error)))
    w = p.workload
    found = FoundPlan(
        **_shared(FoundPlan, p)
        | {
            "settings": settings_of(w),
            "samples_per_s": w.batch / p.step_time_s,
            "safe_reserved_bytes": p.estimate.safe_reserved_bytes,
            "headline": split_words(p),
            "reasons": [ReasonAnswer(**_shared(ReasonAnswer, r), kind_in_words=KIND_WORDS[r.kind]) for r in p.reasons],
            "commands": Commands(
                plan=f"{command_of('plan', query)} --save plan.json",
                train=train_command(w, "plan.json") if find_task(w.task).is_trained else None,
                estimate=estimate_command(w),
            ),
        }
    )
    return PlanAnswer(found=found, missing=None)


def _shared(model: type[Answer], record: Any) -> dict[str, Any]:
    """What an answer takes from a record as it is: fields and properties of the same name."""
    return {name: getattr(record, name) for name in model.model_fields if hasattr(record, name)}


def settings_of(workload: Workload) -> dict[str, Any]:
    """The keywords of a workload that are not at their default, and those that people look for."""
    always = having(in_answers=True)
    found = {
        f.name: to_data(getattr(workload, f.name))
        for f in fields(workload)
        if f.name in always or getattr(workload, f.name) != f.default
    }
    return {name: value for name, value in found.items() if value is not None}


def command_of(verb: str, query: JobQuery) -> str:
    """The command line of a query: the options that are not at their default."""
    defaults = {name: field.default for name, field in type(query).model_fields.items()}
    first = ("batch", "seq", "gpu")
    words = ["vramfit", verb, query.model]
    for name in (*first, *(n for n in defaults if n not in ("model", *first))):
        value = getattr(query, name, None)
        if name in first or value != defaults[name]:
            words += options_of(name, value)
    return shlex.join(words)


def options_of(name: str, value: Any) -> list[str]:
    """A value as options of a command; nothing for what is off."""
    option = f"--{name.replace('_', '-')}"
    return [] if value is None or value is False else [option] if value is True else [option, str(value)]
