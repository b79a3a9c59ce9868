"""Queries answered: what runs inside a worker process."""

import shlex
from dataclasses import fields
from typing import Any

from vramfit.devices.catalogue import find_gpu
from vramfit.errors import NoPlanFits, VramfitError, WorkloadError
from vramfit.models.catalogue import find_entry, unknown_model
from vramfit.records.codec import to_data
from vramfit.records.estimate import Estimate
from vramfit.records.plan import Plan
from vramfit.report.plan import KIND_WORDS, estimate_command, split_words, train_command
from vramfit.report.verdict import verdict_of
from vramfit.report.words import group_name, peak_moment
from vramfit.tasks import find_task
from vramfit.web import answers
from vramfit.web.queries import EstimateQuery, JobQuery, MaxBatchQuery, PlanQuery, Query, keywords_of
from vramfit.workload import Workload

NUM_LARGEST = 12
OK, REFUSED, BROKEN = 200, 422, 500


def answer(query: Query, *, allow_local: bool = False) -> tuple[int, bytes]:
    """Status and JSON text for one query; what is wrong with it is an answer too."""
    try:
        made: answers.Answer
        if isinstance(query, EstimateQuery):
            made = estimated(query, allow_local)
        elif isinstance(query, MaxBatchQuery):
            made = largest(query, allow_local)
        else:
            made = planned(query, allow_local)
    except VramfitError as error:
        return REFUSED, problem(error).model_dump_json().encode()
    except Exception as error:  # a bug: the server lives on and says so
        text = f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return BROKEN, answers.Problem(error=text, hint="this is a bug in vramfit").model_dump_json().encode()
    return OK, made.model_dump_json().encode()


def problem(error: VramfitError) -> answers.Problem:
    """An error as an answer."""
    problems = list(error.problems) if isinstance(error, WorkloadError) else []
    return answers.Problem(error=str(error), hint=error.hint, problems=problems)


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


def estimated(query: EstimateQuery, allow_local: bool) -> answers.EstimateAnswer:
    """What a job takes."""
    from vramfit.estimator.predict import estimate

    return describe_estimate(estimate(model_of(query, allow_local), **keywords_of(query)), query)


def describe_estimate(e: Estimate, query: JobQuery) -> answers.EstimateAnswer:
    """An estimate as the page shows it."""
    verdict = verdict_of(e)
    held = [
        answers.Held(
            what=group_name(g),
            category=g.category,
            module=g.module,
            num_blocks=g.num_blocks,
            allocated_bytes=g.allocated_bytes,
        )
        for g in e.groups[:NUM_LARGEST]
    ]
    return answers.EstimateAnswer(
        settings=settings_of(e.workload),
        gpu=e.gpu,
        basis=e.basis,
        torch_version=e.torch_version.partition("+")[0],
        fits=e.fits,
        tone=verdict.tone,
        headline=verdict.headline,
        details=list(verdict.details),
        peak_requested_bytes=e.peak_requested_bytes,
        peak_allocated_bytes=e.peak_allocated_bytes,
        peak_reserved_bytes=e.peak_reserved_bytes,
        peak_process_bytes=e.peak_process_bytes,
        safe_reserved_bytes=e.safe_reserved_bytes,
        context_bytes=e.context_bytes,
        capacity_bytes=e.capacity_bytes,
        total_memory_bytes=e.total_memory_bytes,
        breakdown=dict(e.breakdown),
        peak=peak_moment(e.peak, e.workload),
        peak_part=e.peak.part,
        largest=held,
        timeline=[answers.Moment(**to_data(point)) for point in e.timeline],
        phases={name: answers.Phase(**to_data(phase)) for name, phase in e.phases.items()},
        step_time_s=e.step_time_s,
        samples_per_s=e.workload.batch / e.step_time_s if e.step_time_s else None,
        notes=list(e.notes),
        command=command_of("estimate", query),
    )


def largest(query: MaxBatchQuery, allow_local: bool) -> answers.MaxBatchAnswer:
    """The largest batch that fits."""
    from vramfit.planner.largest import max_batch

    found = max_batch(model_of(query, allow_local), **keywords_of(query))
    e = found.estimate
    assert e.capacity_bytes is not None
    return answers.MaxBatchAnswer(
        gpu=e.gpu,
        title=find_gpu(e.gpu).title if e.gpu is not None else str(query.memory),
        batch=found.batch,
        cold_batch=found.cold_batch,
        margin_batch=found.margin_batch or 0,
        margin_reason=found.margin_reason,
        limited_by=found.limited_by,
        capacity_bytes=e.capacity_bytes,
        safe_reserved_bytes=e.safe_reserved_bytes,
    )


def planned(query: PlanQuery, allow_local: bool) -> answers.PlanAnswer:
    """A plan, or why there is none."""
    from vramfit.planner.plan import plan

    try:
        made = plan(model_of(query, allow_local), **keywords_of(query))
    except NoPlanFits as error:
        missing = answers.MissingPlan(
            error=str(error),
            hint=error.hint,
            shortfall_bytes=error.shortfall_bytes,
            allow=list(error.allow),
            gpu=error.gpu,
            model=error.model,
        )
        return answers.PlanAnswer(found=None, missing=missing)
    return answers.PlanAnswer(found=describe_plan(made, query), missing=None)


def describe_plan(p: Plan, query: PlanQuery) -> answers.FoundPlan:
    """A plan as the page shows it."""
    w = p.workload
    reasons = [
        answers.ReasonAnswer(
            setting=r.setting,
            kind=r.kind,
            kind_in_words=KIND_WORDS[r.kind],
            why=r.why,
            cost="" if not r.cost else r.cost,
        )
        for r in p.reasons
    ]
    return answers.FoundPlan(
        settings=settings_of(w),
        micro_batch=p.micro_batch,
        accumulate=p.accumulate,
        evaluation_batch=p.evaluation_batch,
        step_time_s=p.step_time_s,
        samples_per_s=w.batch / p.step_time_s,
        safe_reserved_bytes=p.estimate.safe_reserved_bytes,
        most_reserved_bytes=p.most_reserved_bytes,
        budget_bytes=p.budget_bytes,
        margin_bytes=p.margin_bytes,
        margin_reason=p.margin_reason,
        headline=split_words(p),
        reasons=reasons,
        alternatives=[answers.AlternativeAnswer(**to_data(a)) for a in p.alternatives],
        notes=list(p.notes),
        commands=answers.Commands(
            plan=f"{command_of('plan', query)} --save plan.json",
            train=train_command(w, "plan.json") if find_task(w.task).is_trained else None,
            estimate=estimate_command(w),
        ),
    )


def settings_of(workload: Workload) -> dict[str, Any]:
    """The keywords of a workload that are not as they are by themselves, and those that people look for."""
    always = ("model", "task", "mode", "batch", "accumulate", "micro_batch", "seq", "precision", "attention", "gpu")
    found = {
        f.name: to_data(getattr(workload, f.name))
        for f in fields(workload)
        if f.name in always or getattr(workload, f.name) != f.default
    }
    return {name: value for name, value in found.items() if value is not None}


def command_of(verb: str, query: JobQuery) -> str:
    """The command line of a query: the options that are not as they are by themselves."""
    known = {name: field.default for name, field in type(query).model_fields.items()}
    words = ["vramfit", verb, query.model]
    for name in ("batch", "seq", "gpu", *(n for n in known if n not in ("model", "batch", "seq", "gpu"))):
        value = getattr(query, name, None)
        shown = name in ("batch", "seq", "gpu") or value != known.get(name)
        if not shown or value is None or value is False:
            continue
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, str(value)]
    return shlex.join(words)
