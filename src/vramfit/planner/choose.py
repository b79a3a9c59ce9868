"""Choose: the fastest of what is proposed and fits, the mildest training first; then what pays in long runs.

`Margin` is what a plan leaves free of the budget, and why; `max_batch` leaves the same.
"""

from dataclasses import dataclass, replace
from typing import Any

from vramfit.errors import MissingExtra, TraceError, WorkloadError
from vramfit.estimator import search
from vramfit.estimator.resolve import is_measured, target_of
from vramfit.planner.heuristics import (
    BASIS_SHARE,
    COMPILE_S,
    LEAST_COMPILED_S,
    LEAST_FOR_LENGTHS,
    LEAST_RECORDED_S,
    LEAST_SHARE,
    LENGTHS_SHARE,
    NEAR_HOST,
    SLOWER,
    SURE,
    TIGHT_PRICE,
    WORTH_PACKING,
)
from vramfit.planner.job import Job
from vramfit.planner.predictions import Choice, can_start_over, compares_too_much, correct, host_share, predict
from vramfit.planner.recipes import Proposal, Recipe, asked_to_capture, ladder, may_pack, recipes
from vramfit.planner.search import Search
from vramfit.planner.varied import least_padded, padding_share, quicker, time_on_lengths
from vramfit.records.estimate import HOST, Estimate, MaxBatch
from vramfit.settings import BF16_CAPABILITY, SETTINGS, lowered
from vramfit.settings.attention import may_be_padded
from vramfit.units import format_bytes
from vramfit.workload import Workload

WORDS = {
    "verified": "this GPU and torch were compared with measurements",
    "derived": "rules are carried over to this GPU",
    "outside": "nothing is promised for this GPU or this torch",
}
OTHER_TORCH = "rules are carried over to this torch"
"""Of a GPU that was measured with another one."""


@dataclass(frozen=True, slots=True)
class Margin:
    """Bytes left free on purpose."""

    num_bytes: int
    reason: str
    is_tight: bool = False
    """Whether nothing of it is for batches of varied lengths."""
    is_thin: bool = False
    """True if the reserve for fragmentation is below what was enough in all measured runs, or nothing."""


def _why(basis: str, workload: Workload) -> str:
    if basis != "derived":
        return WORDS[basis]
    few = [s.few_measured for name, s in SETTINGS.items() if s.few_measured and getattr(workload, name)]
    if few:
        return few[0]
    is_known = workload.gpu is not None and workload.num_gpus == 1 and is_measured(workload.gpu)
    return OTHER_TORCH if is_known else WORDS[basis]


def tight_margin_of(budget_bytes: int, basis: str, workload: Workload) -> Margin:
    """The least that is left where the usual margin leaves no plan: what predictions may be off."""
    num_bytes = int(BASIS_SHARE[basis] * budget_bytes)
    most = f"only {format_bytes(num_bytes)} stay free, since no settings of this kind leave more"
    why = f"{BASIS_SHARE[basis]:.0%} since {_why(basis, workload)}, and nothing for batches of varied lengths"
    return Margin(num_bytes, f"{most}: {why}", is_tight=True, is_thin=True)


def given_margin(budget_bytes: int, given: float | int) -> Margin:
    """The margin that the user gives, a share of the budget or bytes."""
    num_bytes = int(given * budget_bytes) if given < 1 else int(given)
    return Margin(num_bytes, f"{format_bytes(num_bytes)} stay free, as asked for")


def margin_of(budget_bytes: int, basis: str, workload: Workload, *, varied: bool, whole: bool = False) -> Margin:
    """The planner's own margin of a budget.

    Args:
        basis: of the prediction.
        workload: whose allocator and mask count.
        varied: whether samples differ in length.
        whole: whether small budgets keep as much for lengths as others: what was not measured inside them.
    """
    basis_share = BASIS_SHARE[basis]
    num_bytes = int(basis_share * budget_bytes)
    why, is_thin = f"{basis_share:.0%} since {_why(basis, workload)}", False
    if varied:
        share = LENGTHS_SHARE[workload.allocator]
        least_bytes = LEAST_FOR_LENGTHS if whole else min(LEAST_FOR_LENGTHS, int(LEAST_SHARE * budget_bytes))
        for_lengths = max(int(share * budget_bytes), least_bytes)
        num_bytes += for_lengths
        words = f"{share:.0%}" if for_lengths > least_bytes else format_bytes(least_bytes)
        why += f", {words} since batches of varied lengths fragment memory"
        if share > LENGTHS_SHARE["expandable"]:
            why += f" ({LENGTHS_SHARE['expandable']:.0%} with allocator expandable)"
        is_thin = for_lengths < LEAST_FOR_LENGTHS
    return Margin(num_bytes, f"{format_bytes(num_bytes)} stay free: {why}", is_thin=is_thin)


def max_batch(model: Any, **keywords: Any) -> MaxBatch:
    """The largest effective batch that fits the GPU or the memory given.

    What the tensors ask for grows with the batch and bounds it from above. From there down every batch is replayed
    inside the capacity until one fits wherever segments are put: that is `batch`. `margin_batch` is found in the same
    way inside what a plan would use of the capacity. Where no precision is given, `usual_batch` is the same in the
    lower one that is usual on the GPU: autocast for training.

    Args:
        model, **keywords: as for `estimate`; `gpu` or `memory` is needed, `batch` is not used.

    Raises:
        WorkloadError: no capacity given, and whatever `estimate` raises.

    >>> found = max_batch("bert-tiny", seq=128, memory="300MiB")
    >>> found.batch > found.margin_batch > 64
    True
    """
    found = search.max_batch(model, **keywords)
    e = found.estimate
    if not found.batch or e.capacity_bytes is None:
        return found
    margin = margin_of(e.capacity_bytes, e.basis, e.workload, varied=may_be_padded(keywords))
    inside = {**keywords, "memory": max(e.capacity_bytes - margin.num_bytes, 1)}
    found = replace(
        found,
        margin_batch=min(search.max_batch(model, **inside).batch, found.batch),
        margin_bytes=margin.num_bytes,
        margin_reason=margin.reason,
    )
    lower = lowered(keywords, e.compute_capability, infers=e.workload.mode == "infer")
    if not lower:
        return found
    try:
        batch = search.max_batch(model, **inside | lower).batch
    except WorkloadError:  # something that was given does not go with it
        return found
    return replace(found, usual_precision=lower.popitem()[1], usual_batch=batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Settings that fit, and the way there."""

    proposal: Proposal
    search: Search
    margin: Margin
    choice: Choice
    estimate: Estimate
    before: Search | None = None
    """The search without what pays in long runs, where these settings have it."""

    @property
    def job(self) -> Job:
        """What was asked for."""
        return self.search.job

    @property
    def recipe(self) -> Recipe:
        """The settings but for how the batch is split."""
        return self.choice.recipe

    @property
    def searches(self) -> tuple[Search, ...]:
        """The search, and the one before it."""
        return (self.search,) if self.before is None else (self.search, self.before)

    @property
    def seconds(self) -> float:
        """Of a step, on real lengths where they are known."""
        return _seconds(self.job, self.choice)

    @property
    def priced_seconds(self) -> float:
        """The same, times what the settings must save to be taken."""
        return self.seconds * self.search.price(self.recipe)

    @property
    def cost(self) -> float:
        """The same, times the price of leaving nothing for other lengths."""
        return _cost(self.search, self.margin, self.choice)


def _seconds(job: Job, choice: Choice) -> float:
    return choice.step_time_s if job.lengths is None else time_on_lengths(job, choice)


def _cost(search: Search, margin: Margin, choice: Choice) -> float:
    price = search.price(choice.recipe) * (TIGHT_PRICE if margin.is_tight else 1.0)
    return _seconds(search.job, choice) * price


def find(job: Job) -> Found | None:
    """The fastest choice of the mildest training that fits, predicted in full.

    Thin-margin plans that cannot run a step again after `empty_cache()` are a last resort.
    """
    if compares_too_much(job, job.budget_bytes):
        return None
    return _mildest(job) or _mildest(replace(job, starts_over=False))


def _mildest(job: Job) -> Found | None:
    for rung in ladder(job):
        found = [f for proposal in rung if (f := _packed_or_padded(job, proposal)) is not None]
        if found:
            return min(found, key=lambda f: f.cost)
    return None


def _packed_or_padded(job: Job, proposal: Proposal) -> Found | None:
    """The fastest choice of a proposal, without padding or with it."""
    packed = _packed(job, proposal)
    if packed is not None and not _waits_for_host(packed.estimate) and _has_padding(packed):
        return packed
    if packed is not None and _no_padded_is_faster(job, proposal, packed):
        return packed
    padded = fastest(job, proposal, packed)
    has_large_mask = packed is None and padded is not None and padded.estimate.has_large_mask
    if padded is not None and has_large_mask and why_not_packed(job, padded.recipe) is None:
        packed = fastest(job, replace(proposal, packs=True))  # which has no mask
    if packed is None or padded is None:
        return packed or padded
    return min((packed, padded), key=lambda f: f.cost)


def _no_padded_is_faster(job: Job, proposal: Proposal, packed: Found) -> bool:
    """Whether padded passes would take longer than packed ones do even if nothing were padding."""
    made = recipes(job, proposal)
    quickest = [recipe for recipe in made if recipe.steps_like(made[0])]  # no other optimizer is quicker
    try:
        return all(SURE * least_padded(job, r) * packed.search.price(r) > packed.cost for r in quickest)
    except (MissingExtra, WorkloadError, TraceError):  # a search says which are left out
        return False


def _packed(job: Job, proposal: Proposal) -> Found | None:
    """The fastest choice without padding, where lengths are known and there would be enough of it, or where layers run
    kernels of their own, which are for packed rows."""
    if not may_pack(job) or job.request.rehearses or proposal.offloads or job.base.num_gpus > 1:
        return None
    packed = replace(proposal, packs=True)
    has_kernels = any(recipe.has_own_kernels for recipe in recipes(job, packed))
    if not has_kernels and padding_share(job, job.base.batch) < WORTH_PACKING:
        return None
    found = fastest(job, packed)
    return found if found is not None and (found.recipe.has_own_kernels or _has_padding(found)) else None


def _has_padding(found: Found) -> bool:
    """Whether there would be enough of it in padded passes."""
    return padding_share(found.job, found.choice.micro_batch) >= WORTH_PACKING


def _waits_for_host(estimate: Estimate) -> bool:
    """Whether the device is done before the host: then fewer tokens save no time."""
    times = estimate.time_breakdown
    return sum(times.values()) - times.get(HOST, 0.0) < times.get(HOST, 0.0)


def why_not_packed(job: Job, recipe: Recipe) -> str | None:
    """What keeps a plan that is padded from being packed; None where nothing does."""
    why_not = {
        "that is not for several GPUs": job.base.num_gpus > 1,
        "this model has no such attention": not job.can_pack,
        "its kernel needs a GPU of sm_80 or newer": job.capability < BF16_CAPABILITY,
        f"its kernel computes in 16 bits, not in {recipe.arithmetic}": recipe.is_32_bit,
        "that is not planned together with offloading": recipe.offloads,
        "that is planned where lengths are known (--lengths, --data) or where it is asked for (--attention packed)": (
            job.lengths is None
        ),
    }
    return next((why for why, is_so in why_not.items() if is_so), None)


def fastest(job: Job, proposal: Proposal, beside: Found | None = None) -> Found | None:
    """The fastest choice of a proposal that leaves a margin; or what was found `beside` it, if that is no slower."""
    made, found = recipes(job, proposal), list[Found]()
    for margin in margins(job, proposal) if made else ():
        inside = _within(job, proposal, made, margin, beside)
        if inside is not None:
            found.append(inside)
            if not margin.is_thin:
                break
    if found:
        return min(found, key=lambda f: f.cost)
    if any(recipe.has_own_kernels for recipe in made):  # whose sums of gradients over rows take some MiB
        return fastest(job, replace(proposal, own_kernels=False))
    return None


def margins(job: Job, proposal: Proposal) -> list[Margin]:
    """The usual margin, and a tight one where the usual one is the planner's own.

    Where memory is tight, passes are captured only if that was asked for: every size of a row is a graph more.
    """
    request, base = job.request, job.base
    if request.margin is not None:
        return [given_margin(job.budget_bytes, request.margin)]
    records, compiles = proposal.captures_graphs, proposal.adds.get("compile", base.is_compiled)
    workload = replace(proposal.on(base), compile=compiles)
    basis = target_of(workload).basis
    workload = replace(workload, allocator=request.fixed.get("allocator", "expandable"))
    varied = may_be_padded(request.fixed) and (job.lengths is None or job.lengths.varies)
    usual = margin_of(job.budget_bytes, basis, workload, varied=varied, whole=records)
    tight = tight_margin_of(job.budget_bytes, basis, workload)
    has_one = tight.num_bytes >= usual.num_bytes or (records and asked_to_capture(request) is None)
    return [usual] if has_one else [usual, tight]


def _within(
    job: Job, proposal: Proposal, made: list[Recipe], margin: Margin, beside: Found | None = None
) -> Found | None:
    """The fastest of these recipes that leaves a margin; what was found beside them, if that is no slower."""
    limit_bytes = job.budget_bytes - margin.num_bytes
    while True:
        search = Search(job, made, limit_bytes)
        choice = search.run()
        if choice is None:
            return None
        if job.lengths is not None:
            choice = quicker(search, choice, repeats=proposal.like is not None and not job.base.is_compiled)
        if beside is not None and _cost(search, margin, choice) >= beside.cost:
            return beside
        estimate = predict(job, choice)
        if estimate.safe_reserved_bytes > limit_bytes or estimate.num_retries or not estimate.fits:
            correct(job, choice, max(estimate.safe_reserved_bytes, limit_bytes + 1))
        elif margin.is_thin and job.starts_over and not can_start_over(job, choice):
            return None  # what stays and the largest gradient are the same in smaller passes
        else:
            return Found(proposal=proposal, search=search, margin=margin, choice=choice, estimate=estimate)


def for_long_run(found: Found) -> Found:
    """The same with layers compiled and passes captured as CUDA graphs, where a run is long enough for that."""
    recorded = _recorded(found)
    if recorded is not None and recorded.recipe.has_own_kernels:  # as fast as compiled, and at once
        return recorded
    compiled = _compiled(found)
    return (recorded or found) if compiled is None else (_recorded(compiled) or compiled)


def _compiled(plain: Found) -> Found | None:
    """The same with compiled layers, where a run is long enough for that; None where it is not."""
    job, recipe, steps = plain.job, plain.recipe, plain.job.request.steps
    if "compile" in job.request.fixed or job.request.exact or job.request.rehearses or steps is None:
        return None
    if recipe.has_own_kernels or recipe.offloads or steps * plain.seconds < LEAST_COMPILED_S:
        return None
    proposal = Proposal(training=plain.proposal.training, packs=recipe.is_packed, adds={"compile": True}, like=recipe)
    try:
        found = fastest(job, proposal)
    except (MissingExtra, WorkloadError, TraceError):  # then not compiled
        return None
    if found is None or steps * found.cost + COMPILE_S >= steps * plain.cost:
        return None
    return replace(found, before=plain.search)


def _recorded(plain: Found) -> Found | None:
    """Packed passes that are captured as CUDA graphs, where that is asked for or pays, and can be; None elsewhere."""
    job, recipe, wish = plain.job, plain.recipe, asked_to_capture(plain.job.request)
    if wish is False or (wish is None and not _pays_to_record(plain)):
        return None
    if recipe.offloads or not (recipe.is_packed or may_pack(job)):
        return None
    proposal = Proposal(training=plain.proposal.training)
    if recipe.is_compiled:
        proposal = replace(proposal, adds={"compile": True}, like=recipe)
    found = fastest(job, proposal.captured())
    if found is None:
        return None
    is_worse = not found.recipe.steps_like(recipe) or found.priced_seconds > SLOWER * plain.priced_seconds
    return None if wish is None and is_worse else replace(found, before=plain.search)


def _pays_to_record(plain: Found) -> bool:
    """Whether a run is not short, and its device may wait for the host."""
    request = plain.job.request
    if request.exact or request.rehearses or (request.steps or 0) * plain.seconds < LEAST_RECORDED_S:
        return False
    return host_share(plain.job, plain.choice) >= NEAR_HOST


def may_pay_to_record(found: Found) -> bool:
    """Whether passes are not captured only because nobody said how long the run is."""
    request, recipe = found.job.request, found.recipe
    if request.steps is not None or asked_to_capture(request) or not recipe.is_packed or recipe.captures_graphs:
        return False
    return host_share(found.job, found.choice) >= NEAR_HOST
