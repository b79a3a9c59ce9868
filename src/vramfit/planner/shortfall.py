"""`no_plan_fits`: what is missing, and the nearest things that would do, each predicted."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from vramfit.devices.catalogue import all_gpus
from vramfit.errors import MissingExtra, NoPlanFits, VramfitError
from vramfit.estimator.target import OLDEST_CAPABILITY
from vramfit.models.catalogue import all_entries, find_entry
from vramfit.planner.bench import Bench
from vramfit.planner.margin import margin_of
from vramfit.planner.request import Request
from vramfit.planner.space import (
    Recipe,
    Training,
    Waiting,
    learns_in_layers,
    micro_batches,
    recipes,
    trainings,
    waitings,
    with_layers,
)
from vramfit.units import format_bytes

MAX_GPUS_TRIED = 3
MAX_MODELS_TRIED = 5
LEAST_BYTES_A_WEIGHT = 8
"""A weight and its gradient in fp32: smaller models beyond this are not tried."""


def no_plan_fits(bench: Bench, margin_bytes: int) -> NoPlanFits:
    """The error for a job that does not fit, with what would help."""
    limit_bytes = bench.budget_bytes - margin_bytes
    recipe, size = least(bench, _first(bench))
    best = bench.estimate(recipe, size)
    shortfall_bytes = best.safe_reserved_bytes - limit_bytes
    allow = _cheapest_to_allow(bench, limit_bytes, recipe)
    gpu = _smallest_gpu(bench, best.safe_reserved_bytes, recipe)
    model = _largest_model(bench, limit_bytes, recipe)
    host_bytes = _enough_host_bytes(bench, limit_bytes)
    w = bench.base
    return NoPlanFits(
        f"{w.model} does not fit: batch {w.batch} × {w.seq} tokens needs {format_bytes(best.safe_reserved_bytes)} at "
        f"the least, and {format_bytes(bench.budget_bytes)} less a margin of {format_bytes(margin_bytes)} leave "
        f"{format_bytes(limit_bytes)}: {format_bytes(shortfall_bytes)} too little",
        best=best,
        shortfall_bytes=shortfall_bytes,
        budget_bytes=bench.budget_bytes,
        margin_bytes=margin_bytes,
        allow=allow,
        gpu=gpu,
        model=model,
        host_bytes=host_bytes,
        hint="; ".join(_remedies(allow, gpu, model, host_bytes)) or "shorten the sequences (seq), or take a larger GPU",
    )


def _remedies(allow: tuple[str, ...], gpu: str | None, model: str | None, host_bytes: int | None) -> Iterator[str]:
    if host_bytes is not None:
        yield f"{format_bytes(host_bytes)} of host memory would do"
    if allow:
        yield f"--allow {','.join(allow)} fits"
    if gpu is not None:
        yield f"{gpu} is the smallest GPU that would do"
    if model is not None:
        yield f"{model} is the largest model of the family that fits"


def _enough_host_bytes(bench: Bench, limit_bytes: int) -> int | None:
    """Host memory with which the same request fits, where it was refused or bounded."""
    request, training = bench.request, _first(bench)
    if request.offloads and bench.base.host_memory is None:
        return None
    free = replace(request, offloads=True)
    size = _smallest_size(bench)
    for waiting in waitings(free, training, able=bench.can_checkpoint):
        for recipe in _recipes(bench, free, training, waiting) if waiting.offload else ():
            if _stays_within(bench, recipe, size, limit_bytes):
                return bench.host_bytes(_all_layers(bench, recipe))
    return None


def least(bench: Bench, training: Training) -> tuple[Recipe, int]:
    """The recipe of a training that takes least, and its micro-batch."""
    made = [recipe for recipe in _all_recipes(bench, training) if bench.fits_host(recipe)]
    if not made:
        raise VramfitError(f"{training.words} does not go with what was asked for")
    size = _smallest_size(bench)
    taken: dict[Recipe, float] = {}
    for recipe in sorted(made, key=bench.floor_bytes) if len(made) > 1 else ():
        if not taken or _may_stay_within(bench, recipe, size, min(taken.values())):
            taken[recipe] = _safe_bytes(bench, recipe, size)
    return _all_layers(bench, min(made, key=lambda r: taken.get(r, inf))), size


def _all_recipes(bench: Bench, training: Training) -> list[Recipe]:
    """Whatever waits in host memory."""
    chosen = waitings(bench.request, training, able=bench.can_checkpoint)
    return [r for waiting in chosen for r in _recipes(bench, bench.request, training, waiting)]


def _recipes(bench: Bench, request: Request, training: Training, waiting: Waiting) -> list[Recipe]:
    capability = bench.target.profile.compute_capability
    return recipes(
        request,
        training,
        bench.base,
        capability,
        waiting,
        compiles=bench.base.compile,
        casts=bench.casts,
        fused=bench.can_fuse,
    )


def _safe_bytes(bench: Bench, recipe: Recipe, size: int) -> float:
    try:
        return bench.safe_bytes(_all_layers(bench, recipe), size)
    except MissingExtra:
        return inf


def _smallest_size(bench: Bench) -> int:
    return micro_batches(bench.request, bench.share)[-1]


def _class_of(precision: str) -> str:
    """bfloat16 or float16, TF32 or not: what a GPU has of them takes as much."""
    return {"tf32": "fp32", "amp-bf16": "amp", "amp-fp16": "amp"}.get(precision, precision)


def _all_layers(bench: Bench, recipe: Recipe) -> Recipe:
    if recipe.checkpointing is not None or not bench.can_checkpoint or not learns_in_layers(recipe):
        return recipe
    return with_layers(recipe, bench.num_layers, bench.num_layers)


def _fits(bench: Bench, training: Training, limit_bytes: int, like: Recipe) -> bool:
    """Whether a training fits in its smallest passes.

    Args:
        like: what takes least of another training, model or GPU: of the recipes, only those like it are predicted.
    """
    made = [r for r in _all_recipes(bench, training) if bench.fits_host(r)]
    made = [r for r in made if r.offload == like.offload] or made
    alike = [r for r in made if _class_of(r.precision) == _class_of(like.precision)]
    made = [r for r in alike if r.optimizer == like.optimizer] or alike or made
    return any(_stays_within(bench, r, _smallest_size(bench), limit_bytes) for r in made)


def _stays_within(bench: Bench, recipe: Recipe, size: int, limit_bytes: int) -> bool:
    """Whether a recipe with all layers checkpointed fits; predicted in full only where it may."""
    may = _may_stay_within(bench, recipe, size, limit_bytes)
    return may and bench.safe_bytes(_all_layers(bench, recipe), size) <= limit_bytes


def _may_stay_within(bench: Bench, recipe: Recipe, size: int, limit_bytes: float) -> bool:
    if bench.floor_bytes(recipe) > limit_bytes:
        return False
    return bench.least_bytes(_all_layers(bench, recipe), size) <= limit_bytes


def _cheapest_to_allow(bench: Bench, limit_bytes: int, like: Recipe) -> tuple[str, ...]:
    """What would have to be allowed beside what is: the mildest change that fits."""
    for training in trainings(bench.request, bench.num_layers, all_allowed=True):
        if training.needs <= bench.request.allow:
            continue
        try:
            if _fits(bench, training, limit_bytes, like):
                return tuple(sorted(training.needs - bench.request.allow))
        except VramfitError:  # this model does not have it
            continue
    return ()


def _smallest_gpu(bench: Bench, needed_bytes: int, like: Recipe) -> str | None:
    """The GPU with the least memory on which the same request has a plan."""
    large = [g for g in all_gpus() if g.total_memory_bytes > needed_bytes and g.compute_capability >= OLDEST_CAPABILITY]
    large.sort(key=lambda g: g.total_memory_bytes)
    num_tried = 0
    for gpu in large:
        fixed = {k: v for k, v in bench.request.fixed.items() if k != "memory"} | {"gpu": gpu.name}
        try:
            other = Bench(bench.model, replace(bench.request, fixed=fixed))
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


def _largest_model(bench: Bench, limit_bytes: int, like: Recipe) -> str | None:
    """The largest model of the same family in the catalogue for which the same request has a plan."""
    entry = find_entry(bench.base.model)
    if entry is None:
        return None
    smaller = [e for e in all_entries() if e.family == entry.family and e.num_parameters < entry.num_parameters]
    possible = [e for e in smaller if e.num_parameters * LEAST_BYTES_A_WEIGHT <= limit_bytes]
    possible.sort(key=lambda e: -e.num_parameters)
    for candidate in possible[:MAX_MODELS_TRIED]:
        try:
            other = Bench(candidate.name, bench.request)
            if _fits(other, _first(other), _limit(other), replace(like, optimizer="")):  # 8 bits pay for large ones
                return candidate.name
        except VramfitError:  # no such head, or shorter sequences
            continue
    return None


def _first(bench: Bench) -> Training:
    """What is asked for, with nothing allowed beside it."""
    return next(trainings(bench.request, bench.num_layers))


def _limit(bench: Bench) -> int:
    request: Request = bench.request
    workload = replace(bench.base, allocator=request.fixed.get("allocator", "expandable"))
    varied = workload.mask == "padded"
    margin = margin_of(bench.budget_bytes, bench.target.basis, workload, request.margin, varied=varied)
    return bench.budget_bytes - margin.num_bytes
