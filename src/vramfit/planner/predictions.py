"""What recipes take at micro-batches, in memory and time: each predicted once, and as little of it as will do."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vramfit.estimator.peaks import Asked, peak_requested, predict_peaks, restart_bytes
from vramfit.estimator.predict import (
    Timed,
    after_recorded,
    estimate_at,
    estimate_evaluation,
    evaluation_stream,
    time_workload,
)
from vramfit.estimator.resolve import resolve_workload, with_mask
from vramfit.estimator.traced import TracedWorkload, least_peaks
from vramfit.models.anatomy import embeddings, encoder_layers
from vramfit.models.catalogue import all_entries
from vramfit.models.resolve import ResolvedModel
from vramfit.planner.heuristics import MAX_EVALUATION_BATCH, MAX_EVALUATION_TIMES, MUCH_SMALLER
from vramfit.planner.job import Job, full_samples, once
from vramfit.planner.recipes import Recipe
from vramfit.planner.request import SPLIT
from vramfit.records.estimate import Estimate
from vramfit.records.stream import Stream
from vramfit.settings import SETTINGS
from vramfit.settings.sizes import passes_of
from vramfit.tasks import find_task
from vramfit.techniques.application import build_prepared
from vramfit.techniques.quantization import inner_tensors
from vramfit.workload import Workload

PROBED_PASSES = 2
"""Micro-batches of a step that is only looked at: the first makes the gradients, all others are like the second."""
ANY_BATCH = 2
"""A trace at this size serves every other one."""


@dataclass(frozen=True, slots=True)
class Peek:
    """A look at settings: how long a step takes, and, once that is asked, how much its tensors ask for."""

    step_time_s: float
    asks: Callable[[], tuple[int, int]]
    """Gives `requested_bytes` and `floor_bytes`; most settings are too slow for anyone to ask."""

    @property
    def requested_bytes(self) -> int:
        """The most that tensors ask for at once."""
        return self.asks()[0]

    @property
    def floor_bytes(self) -> int:
        """What the optimizer's step asks for, whatever the micro-batch."""
        return self.asks()[1]


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings and a split of the batch, with what they were found to take."""

    recipe: Recipe
    micro_batch: int
    step_time_s: float
    safe_reserved_bytes: int


def num_predicted(job: Job) -> int:
    """Settings that were looked at or predicted so far."""
    return sum(name in ("peek", "safe_bytes", "evaluation") for name, *_ in job.answers)


# Workloads and their traces


@once
def traced_passes(job: Job, recipe: Recipe, num_passes: int) -> TracedWorkload:
    """A job of so many micro-batches; their size is filled in later."""
    workload = _with(job, recipe, passes_of(1, num_passes * job.base.num_gpus))
    short = recipe.is_packed and not job.base.is_joint  # short ones may all go into one row
    most = job.base.share * job.base.texts_per_sample if short else None
    return replace(job.traced, workload=workload, num_sequences=most, num_texts=job.base.step_texts)


def _traced(job: Job, recipe: Recipe, micro_batch: int) -> TracedWorkload:
    traced = traced_passes(job, recipe, min(job.passes(micro_batch), PROBED_PASSES))
    num_texts = job.base.share * job.base.texts_per_sample
    if recipe.is_packed and traced.workload.runs_twice and num_texts <= micro_batch * job.base.row_texts:
        return replace(traced, num_sequences=num_texts)
    return traced


def workload_of(job: Job, recipe: Recipe, micro_batch: int) -> Workload:
    """The job as a workload."""
    return _with(job, recipe, passes_of(micro_batch, job.base.batch))


def _with(job: Job, recipe: Recipe, sizes: dict[str, Any]) -> Workload:
    """The job with a recipe, a split, and the mask that takes most then."""
    workload = replace(job.base, **recipe.keywords(), **sizes)
    return with_mask(workload, job.traced.resolved, job.target.profile, job.request.fixed)


def two_steps(job: Job, recipe: Recipe, micro_batch: int) -> tuple[Stream, Any]:
    """What they ask for, and the options of the allocator; of two passes, the second is as small as it will be."""
    traced = whole = _traced(job, recipe, micro_batch)
    if job.passes(micro_batch) == PROBED_PASSES:
        whole = replace(traced, workload=workload_of(job, recipe, micro_batch))
    return traced.template(micro_batch).instantiate(micro_batch, whole.order(1, micro_batch)), traced.options


# Memory


@once
def safe_bytes(job: Job, recipe: Recipe, micro_batch: int) -> int:
    """What is reserved at most, wherever segments lie: two steps replayed."""
    return predict_peaks(*two_steps(job, recipe, micro_batch), None).safe_reserved_bytes


def correct(job: Job, choice: Choice, num_bytes: int) -> None:
    """Keep what a whole prediction found in place of `safe_bytes`."""
    job.answers["safe_bytes", choice.recipe, choice.micro_batch] = num_bytes


def predict(job: Job, choice: Choice) -> Estimate:
    """The whole prediction, inside the budget."""
    fixed = {k: v for k, v in job.request.fixed.items() if k not in SPLIT}
    chosen = {**fixed, **choice.recipe.keywords(), "batch": job.base.batch, "micro_batch": choice.micro_batch}
    chosen |= {"loop": "stepper", "trust_remote_code": job.request.trust_remote_code}
    return estimate_at(*resolve_workload(job.model, chosen), choice.micro_batch)


def can_start_over(job: Job, choice: Choice) -> bool:
    """Whether a step can be done again inside the budget when nothing is cached any more."""
    return restart_bytes(*two_steps(job, choice.recipe, choice.micro_batch)) <= job.budget_bytes


def is_lean(job: Job, micro_batch: int) -> bool:
    """Whether no pass of full size runs while gradients are alive: it is the only one, or the second is small."""
    rest = job.base.share - micro_batch
    return rest <= 0 or (job.passes(micro_batch) == PROBED_PASSES and rest < MUCH_SMALLER * micro_batch)


@once
def weight_bytes(job: Job, recipe: Recipe) -> int:
    """What the weights ask for, which no recipe's gradients exceed."""
    template = traced_passes(job, recipe, PROBED_PASSES if job.base.share > 1 else 1).template(ANY_BATCH)
    return sum(template.instantiate(ANY_BATCH, [("load", "load")]).events)


@once
def host_bytes(job: Job, recipe: Recipe) -> int:
    """What waits in host memory, at the least."""
    return traced_passes(job, recipe, 1).template(ANY_BATCH).host_bytes_at(1)


def fits_host(job: Job, recipe: Recipe) -> bool:
    """Whether what waits in host memory is within what was given for it."""
    limit = job.base.host_memory
    return limit is None or not recipe.offloads or host_bytes(job, recipe) <= limit


# Floors: the least that is held, by the shapes of weights or a short trace


def floor_bytes(job: Job, recipe: Recipe) -> int:
    """What is held at least, whatever the split and the checkpointing."""
    all_bytes, learned_bytes, num_learned = _shapes(job, recipe.of_weights())
    if recipe.offloads_layers:
        return _least_peaks(job, recipe, 1, ANY_BATCH if job.base.share > 1 else 1).get("optimizer", 0)
    if recipe.offloads:
        return all_bytes
    floor = all_bytes + learned_bytes * (1 + recipe.state_copies) + num_learned * recipe.state_bytes
    return int(floor) // (job.base.num_gpus if job.base.shards else 1)


@once
def _vectors_bytes(job: Job) -> int:
    return job.traced.vectors_bytes()


@once
def _compared_bytes(job: Job) -> int:
    return job.traced.compared_bytes()


def compares_too_much(job: Job, limit_bytes: float, recipe: Recipe | None = None) -> bool:
    """Whether a step cannot compare its texts within a limit, however it is split; beside what a recipe holds then."""
    if not job.base.is_joint:
        return False
    if _vectors_bytes(job) > limit_bytes:
        return True
    num_bytes = _compared_bytes(job)
    if recipe is not None and not recipe.offloads and not job.base.shards:
        all_bytes, learned_bytes, num_learned = _shapes(job, recipe.of_weights())
        num_bytes += all_bytes + int(learned_bytes * recipe.state_copies + num_learned * recipe.state_bytes)
    return num_bytes > limit_bytes


def least_bytes(job: Job, recipe: Recipe, micro_batch: int) -> int:
    """What is asked for at least at a micro-batch, by a short trace; 0 where that says nothing."""
    return max(_least_peaks(job, recipe, micro_batch, micro_batch).values(), default=0)


@once
def _least_peaks(job: Job, recipe: Recipe, micro_batch: int, traced_at: int) -> dict[str, int]:
    return least_peaks(_traced(job, recipe, micro_batch), micro_batch, traced_at)


@once
def _shapes(job: Job, recipe: Recipe) -> tuple[int, int, int]:
    """Bytes of all weights, bytes and number of those that are sure to learn; nothing is traced.

    Embeddings and layers are sure to learn where they are not frozen: in families of the catalogue, as transformers
    builds them, a step uses all of them. Of other models that is not known.

    Raises:
        WorkloadError, MissingExtra: as `apply`.
    """
    traced = traced_passes(job, recipe, 1)
    model = build_prepared(traced.resolved, traced.workload)
    weights: list[Any] = list(model.parameters())
    if traced.workload.is_quantized:
        weights = [part for p in weights for _, part in inner_tensors(p)]
    num_bytes = sum(p.nbytes for p in weights)
    parts = (embeddings(model), *encoder_layers(model)) if _is_known(traced.resolved) else ()
    learned = {p for part in parts if part is not None for p in part.parameters() if p.requires_grad}
    return num_bytes, sum(p.nbytes for p in learned), sum(p.numel() for p in learned)


def _is_known(resolved: ResolvedModel) -> bool:
    families = {entry.family for entry in all_entries()}
    is_theirs = resolved.model_class.__module__.startswith("transformers.")
    return is_theirs and getattr(resolved.config, "model_type", None) in families


# Time


@once
def peek(job: Job, recipe: Recipe, micro_batch: int) -> Peek:
    """A quick look, from a trace that serves every micro-batch; as of several passes, also where one does."""
    _, template = _probed(job, recipe, micro_batch)
    split = _split(job, recipe, micro_batch, timed_batch(job, recipe))
    seconds = time_of(job, template, split, micro_batch).step.seconds
    return Peek(seconds, partial(_asked_bytes, job, recipe, micro_batch))


@once
def _asked_bytes(job: Job, recipe: Recipe, micro_batch: int) -> tuple[int, int]:
    """The peak of what tensors ask for, and that of the optimizer's step."""
    _, template = _probed(job, recipe, micro_batch)
    peaks = _asked(job, recipe, ANY_BATCH if template.probe else micro_batch).peaks(micro_batch)
    return max(peaks.values()), peaks["optimizer"]


@once
def _asked(job: Job, recipe: Recipe, traced_at: int) -> Asked:
    """What a probe asks for at any batch that its trace serves."""
    traced, template = _probed(job, recipe, traced_at)
    return Asked(template, traced.order(num_steady=1))


def _probed(job: Job, recipe: Recipe, micro_batch: int) -> tuple[TracedWorkload, Any]:
    several = job.base.share > 1
    traced = traced_passes(job, recipe, PROBED_PASSES if several else 1)
    return traced, traced.template(max(micro_batch, ANY_BATCH) if several else micro_batch)


def timed_batch(job: Job, recipe: Recipe) -> int:
    """Samples of full length that go through a GPU in a step: packed rows hold what real lengths have."""
    return full_samples(job) if recipe.is_packed else job.base.share


def step_time(job: Job, recipe: Recipe, micro_batch: int) -> float:
    """Seconds of a step by the very trace that it has, of packed rows on real lengths."""
    return _step(job, recipe, micro_batch, timed_batch(job, recipe)).step.seconds


def full_time(job: Job, choice: Choice) -> float:
    """Seconds of a step whose samples are all of full length."""
    if not choice.recipe.is_packed:
        return choice.step_time_s
    return _step(job, choice.recipe, choice.micro_batch, job.base.share).step.seconds


def host_share(job: Job, choice: Choice) -> float:
    """How long the host is busy in a step, as a share of the device's time; of packed rows on real lengths."""
    step = _step(job, choice.recipe, choice.micro_batch, timed_batch(job, choice.recipe)).step
    return step.host_s / max(sum(step.device_s.values()), step.seconds / 1000)


def _step(job: Job, recipe: Recipe, micro_batch: int, batch: int) -> Timed:
    template = _traced(job, recipe, micro_batch).template(micro_batch)
    return time_of(job, template, _split(job, recipe, micro_batch, batch), micro_batch)


def _split(job: Job, recipe: Recipe, micro_batch: int, batch: int) -> Workload:
    """A step of so many samples of full length."""
    return _with(job, recipe, passes_of(min(micro_batch, batch), batch * job.base.num_gpus))


def time_of(job: Job, template: Any, workload: Workload, micro_batch: int, num_passes: int | None = None) -> Timed:
    """The time of a step on the GPU, on a usual one where its rates are not known; of so many passes, where given."""
    timed = time_workload(template, workload, micro_batch, replace(job.target, gpu=job.timed_gpu), num_passes)
    assert timed is not None  # the job has taken a GPU whose rates are known
    return timed


@once
def work_by_length(job: Job, recipe: Recipe, seq: int) -> Any:
    """What passes of a recipe do at another length."""
    passes = partial(_passes_at, job, recipe.of_passes(), seq)
    return traced_passes(job, recipe, PROBED_PASSES).work_by_length(seq, ANY_BATCH, passes)


@once
def _passes_at(job: Job, recipe: Recipe, seq: int) -> Any:
    return traced_passes(job, recipe, PROBED_PASSES).trace(None, passes_at=seq)


# Evaluation


def choose_evaluation(job: Job, choice: Choice, limit_bytes: int) -> Estimate:
    """The estimate of the evaluation batch: a power of two, and the largest that fits beside the training state."""
    traced, target = resolve_workload(job.model, _in_evaluation(job, choice))
    traced = TracedWorkload(traced.workload, traced.resolved, traced.profile)  # layers that wait do so here too
    recipe = choice.recipe.eager()  # captured passes are let go of before
    training, _ = two_steps(job, recipe, choice.micro_batch)
    if choice.recipe.captures_graphs:
        training = after_recorded(training, traced.profile)
    limit_bytes -= _traced(job, recipe, choice.micro_batch).template(ANY_BATCH).gathered_peak_bytes
    sizes = [2**i for i in range(9) if 2**i <= min(MAX_EVALUATION_BATCH, MAX_EVALUATION_TIMES * job.base.batch)]
    while len(sizes) > 1:
        stream = evaluation_stream(training, traced, sizes[-1])
        if peak_requested(stream) <= limit_bytes:
            safe = job.answers["evaluation", choice, sizes[-1]] = predict_peaks(
                stream, traced.options, None
            ).safe_reserved_bytes
            if safe <= limit_bytes:
                break
        sizes.pop()
    return estimate_evaluation(training, traced, target, sizes[-1])


def _in_evaluation(job: Job, choice: Choice) -> dict[str, Any]:
    """What a forward pass has of a training step; adapters add less than one percent, and are left out."""
    given = {**job.request.fixed, **choice.recipe.keywords()}
    packs = not job.request.pads_evaluation and find_task(job.base.task).why_not_unpacked is None
    settings = {SETTINGS[name]: value for name, value in given.items() if SETTINGS[name].in_inference}
    kept = {setting.keyword: setting.inferred(value, packs=packs) for setting, value in settings.items()}
    return {**kept, "mode": "infer", "batch": 1, "trust_remote_code": job.request.trust_remote_code}
