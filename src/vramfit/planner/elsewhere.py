"""Where a job would fit: other settings, GPUs and models for one that does not fit here; and cloud instances."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from vramfit.devices.catalogue import GPU, Instance, all_gpus, all_instances, find_gpu
from vramfit.errors import MissingExtra, NoPlanFits, VramfitError
from vramfit.estimator.resolve import OLDEST_CAPABILITY
from vramfit.estimator.traced import collection_paused
from vramfit.models.catalogue import all_entries, find_entry
from vramfit.planner.choose import find, margins
from vramfit.planner.job import Job, num_layers
from vramfit.planner.predictions import (
    Choice,
    compares_too_much,
    fits_host,
    floor_bytes,
    host_bytes,
    least_bytes,
    predict,
    safe_bytes,
)
from vramfit.planner.reasons import words_of
from vramfit.planner.recipes import Proposal, Recipe, Training, levels, micro_batches, recipes, trainings
from vramfit.planner.request import Request
from vramfit.records.plan import InstanceFit
from vramfit.settings.sizes import split_of
from vramfit.units import format_bytes

OnGPU = Callable[[str, int, int], None]
MAX_GPUS_TRIED = 3
MAX_MODELS_TRIED = 5
LEAST_BYTES_A_WEIGHT = 8
"""A weight and its gradient in fp32: smaller models beyond this are not tried."""


def no_plan_fits(job: Job, margin_bytes: int) -> NoPlanFits:
    """The error for a job that does not fit, with what would help."""
    limit_bytes = job.budget_bytes - margin_bytes
    recipe, size = least(job, _first(job))
    best = predict(job, Choice(recipe, size, 0.0, 0))
    shortfall_bytes = best.safe_reserved_bytes - limit_bytes
    allow = _cheapest_to_allow(job, limit_bytes, recipe)
    gpu = _smallest_gpu(job, best.safe_reserved_bytes, recipe)
    model = _largest_model(job, limit_bytes, recipe)
    enough_bytes = _enough_host_bytes(job, limit_bytes)
    w = job.base
    return NoPlanFits(
        f"{w.model} does not fit: batch {w.batch} × {w.seq} tokens needs {format_bytes(best.safe_reserved_bytes)} at "
        f"the least, and {format_bytes(job.budget_bytes)} less a headroom of {format_bytes(margin_bytes)} leave "
        f"{format_bytes(limit_bytes)}: {format_bytes(shortfall_bytes)} too little",
        best=best,
        shortfall_bytes=shortfall_bytes,
        budget_bytes=job.budget_bytes,
        margin_bytes=margin_bytes,
        allow=allow,
        gpu=gpu,
        model=model,
        host_bytes=enough_bytes,
        hint="; ".join(_remedies(allow, gpu, model, enough_bytes))
        or "shorten the sequences (seq), or take a larger GPU",
    )


def _remedies(allow: tuple[str, ...], gpu: str | None, model: str | None, enough_bytes: int | None) -> Iterator[str]:
    if enough_bytes is not None:
        yield f"{format_bytes(enough_bytes)} of host memory would do"
    if allow:
        yield f"--allow {','.join(allow)} fits"
    if gpu is not None:
        yield f"{gpu} is the smallest GPU that would do"
    if model is not None:
        yield f"{model} is the largest model of the family that fits"


def _enough_host_bytes(job: Job, limit_bytes: int) -> int | None:
    """Host memory with which the same request fits, where it was refused or bounded."""
    if job.request.offloads and job.base.host_memory is None:
        return None
    free = replace(job, request=replace(job.request, offloads=True))
    for proposal in levels(free, _first(job)):
        for recipe in recipes(free, proposal) if proposal.offloads else ():
            if _stays_within(job, recipe, limit_bytes):
                return host_bytes(job, _all_layers(job, recipe))
    return None


def least(job: Job, training: Training) -> tuple[Recipe, int]:
    """The recipe of a training that takes least, and its micro-batch."""
    made = _all_recipes(job, training)
    if not made:
        raise VramfitError(f"{training.words} does not go with what was asked for")
    taken: dict[Recipe, float] = {}
    for recipe in sorted(made, key=lambda r: floor_bytes(job, r)) if len(made) > 1 else ():
        if not taken or _may_stay_within(job, recipe, min(taken.values())):
            try:
                taken[recipe] = safe_bytes(job, _all_layers(job, recipe), _smallest_size(job))
            except MissingExtra:
                taken[recipe] = inf
    return _all_layers(job, min(made, key=lambda r: taken.get(r, inf))), _smallest_size(job)


def _all_recipes(job: Job, training: Training) -> list[Recipe]:
    """Whatever waits in host memory, and fits there."""
    return [r for proposal in levels(job, training) for r in recipes(job, proposal) if fits_host(job, r)]


def _smallest_size(job: Job) -> int:
    return micro_batches(job.request, job.base.share)[-1]


def _all_layers(job: Job, recipe: Recipe) -> Recipe:
    if recipe.is_checkpointed or not job.can_checkpoint or not recipe.learns_in_layers:
        return recipe
    return recipe.with_layers(num_layers(job), num_layers(job))


def _fits(job: Job, training: Training, limit_bytes: int, like: Recipe) -> bool:
    """Whether a training fits in its smallest passes.

    Args:
        like: what takes least of another training, model or GPU: of the recipes, only those like it are predicted.
    """
    made = like.nearest(_all_recipes(job, training))
    return any(_stays_within(job, recipe, limit_bytes) for recipe in made)


def _stays_within(job: Job, recipe: Recipe, limit_bytes: int) -> bool:
    """Whether a recipe with all layers checkpointed fits; predicted in full only where it may."""
    may = _may_stay_within(job, recipe, limit_bytes)
    return may and safe_bytes(job, _all_layers(job, recipe), _smallest_size(job)) <= limit_bytes


def _may_stay_within(job: Job, recipe: Recipe, limit_bytes: float) -> bool:
    if floor_bytes(job, recipe) > limit_bytes or compares_too_much(job, limit_bytes, recipe):
        return False
    return least_bytes(job, _all_layers(job, recipe), _smallest_size(job)) <= limit_bytes


def _cheapest_to_allow(job: Job, limit_bytes: int, like: Recipe) -> tuple[str, ...]:
    """What would have to be allowed beside what is: the mildest change that fits."""
    for training in trainings(job, all_allowed=True):
        if training.needs <= job.request.allow:
            continue
        try:
            if _fits(job, training, limit_bytes, like):
                return tuple(sorted(training.needs - job.request.allow))
        except VramfitError:  # this model does not have it
            continue
    return ()


def _smallest_gpu(job: Job, needed_bytes: int, like: Recipe) -> str | None:
    """The GPU with the least memory on which the same request has a plan."""
    large = [g for g in all_gpus() if g.total_memory_bytes > needed_bytes and g.compute_capability >= OLDEST_CAPABILITY]
    large.sort(key=lambda g: g.total_memory_bytes)
    num_tried = 0
    for gpu in large:
        fixed = {k: v for k, v in job.request.fixed.items() if k != "memory"} | {"gpu": gpu.name}
        try:
            other = Job.of(job.model, replace(job.request, fixed=fixed))
        except VramfitError:  # it does not have what was asked for
            continue
        if needed_bytes > _limit(other):
            continue
        num_tried += 1
        if _fits(other, _first(other), _limit(other), like):
            return gpu.name
        if num_tried == MAX_GPUS_TRIED:
            break
    return None


def _largest_model(job: Job, limit_bytes: int, like: Recipe) -> str | None:
    """The largest model of the same family and use in the catalogue for which the same request has a plan."""
    entry = find_entry(job.base.model)
    if entry is None:
        return None
    alike = [e for e in all_entries() if (e.family, e.use) == (entry.family, entry.use)]
    smaller = [e for e in alike if e.num_parameters < entry.num_parameters]
    possible = [e for e in smaller if e.num_parameters * LEAST_BYTES_A_WEIGHT <= limit_bytes]
    possible.sort(key=lambda e: -e.num_parameters)
    for candidate in possible[:MAX_MODELS_TRIED]:
        try:
            other = Job.of(candidate.name, job.request)
            if _fits(other, _first(other), _limit(other), like.with_any_optimizer()):  # 8 bits pay for large ones
                return candidate.name
        except VramfitError:  # no such head, or shorter sequences
            continue
    return None


def _first(job: Job) -> Training:
    """What is asked for, with nothing allowed beside it."""
    return next(trainings(job))


def _limit(job: Job) -> int:
    return job.budget_bytes - margins(job, Proposal())[0].num_bytes


def fit_instances(
    model: Any,
    provider: str = "sagemaker",
    on_gpu: OnGPU = lambda name, done, total: None,
    **keywords: Any,
) -> list[InstanceFit]:
    """The instances of a provider, those on which the job fits first, smallest GPU first.

    Instances whose GPU the current torch no longer runs on are left out.

    Args:
        model, **keywords: as for `plan`; `gpu` and `memory` are not used.
        on_gpu: told before each GPU: its name, how many are done, how many there are.

    Raises:
        WorkloadError: as for `plan`.
    """
    instances = _instances(provider)
    gpus, made = {i.gpu: find_gpu(i.gpu) for i in instances}, list[InstanceFit]()
    for done, gpu in enumerate(sorted(gpus.values(), key=lambda gpu: gpu.total_memory_bytes)):
        on_gpu(gpu.name, done, len(gpus))
        fit = _fit_on(model, gpu, keywords)
        made += [replace(fit, instance=i.name, num_gpus=i.num_gpus) for i in instances if i.gpu == gpu.name]
    return sorted(made, key=lambda fit: (not fit.fits, fit.budget_bytes, fit.num_gpus))


def smallest_instance(
    model: Any, provider: str = "sagemaker", larger_than: str | None = None, **keywords: Any
) -> InstanceFit | None:
    """The instance with the smallest GPU on which the job fits; None where there is none.

    Args:
        model, **keywords: as for `plan`; `gpu` and `memory` are not used.
        larger_than: a GPU of the catalogue; only those with more memory are looked at.
    """
    instances = _instances(provider)
    too_small_bytes = find_gpu(larger_than).total_memory_bytes if larger_than is not None else 0
    for gpu in sorted({find_gpu(i.gpu) for i in instances}, key=lambda gpu: gpu.total_memory_bytes):
        if gpu.total_memory_bytes > too_small_bytes and (fit := _fit_on(model, gpu, keywords)).fits:
            mine = [i for i in instances if i.gpu == gpu.name]
            best = min(mine, key=lambda i: (i.num_gpus, i.host_memory_bytes or 0))
            return replace(fit, instance=best.name, num_gpus=best.num_gpus)
    return None


def _instances(provider: str) -> list[Instance]:
    """The instances of a provider whose GPU the current torch runs on."""
    mine = [i for i in all_instances() if i.provider == provider]
    return [i for i in mine if find_gpu(i.gpu).compute_capability >= OLDEST_CAPABILITY]


def _fit_on(model: Any, gpu: GPU, keywords: Mapping[str, Any]) -> InstanceFit:
    """The plan for one GPU, as far as an overview needs it."""
    missing = InstanceFit(
        instance="",
        gpu=gpu.name,
        num_gpus=1,
        budget_bytes=gpu.total_memory_bytes,
        fits=False,
        settings="too little memory",
    )
    try:
        with collection_paused():
            job = Job.of(model, Request.of({**keywords, "gpu": gpu.name, "memory": None}))
            missing = replace(missing, budget_bytes=job.budget_bytes)
            found = find(job)
    except VramfitError as error:
        return replace(missing, settings=str(error))
    if found is None:
        return missing
    choice = found.choice
    return replace(
        missing,
        fits=True,
        settings=words_of(job, choice),
        **split_of(choice.micro_batch, job.passes(choice.micro_batch)),
        step_time_s=choice.step_time_s,
        safe_reserved_bytes=found.estimate.safe_reserved_bytes,
    )
