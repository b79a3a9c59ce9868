"""`Job`: what a plan is asked for, resolved once; and `once`, for what is predicted of it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from random import Random
from statistics import mean
from typing import Any, Concatenate, ParamSpec, TypeVar

from vramfit.devices.catalogue import DEFAULT_ARCHITECTURE, GPU, all_gpus
from vramfit.errors import WorkloadError
from vramfit.estimator.predict import has_rates
from vramfit.estimator.resolve import Target, resolve_workload
from vramfit.estimator.traced import TracedWorkload
from vramfit.models.anatomy import encoder_layers, max_positions
from vramfit.models.build import build_for
from vramfit.models.configuration import supported_attention
from vramfit.models.resolve import resolve
from vramfit.planner.heuristics import LEAST_OF_MEAN, MOST_BATCHES
from vramfit.planner.request import Lengths, Request
from vramfit.settings.attention import precision_needed
from vramfit.techniques.packing.attention import takes_heads
from vramfit.timing.model import speed_of
from vramfit.workload import SIZE_HINT, Workload

P = ParamSpec("P")
R = TypeVar("R")
NUM_BATCHES, SEED = 64, 0
"""Batches that are drawn from real lengths."""
FEW_BATCHES = 4
"""With fewer batches an epoch, batches are drawn as parts of an epoch."""
MOST_DRAWN, FEWEST_BATCHES = 2**20, 2
"""Lengths that are drawn in all, of very large batches; each of these has about as many tokens as any other."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """One job on one GPU."""

    model: Any
    """As `estimate` takes it."""
    request: Request
    lengths: Lengths | None
    """Real lengths of the samples, cut to what the model takes."""
    traced: TracedWorkload
    """The job as it was asked for, settings left plain."""
    target: Target
    budget_bytes: int
    timed_gpu: GPU
    """Whose times are predicted: a usual one where the job's rates are not known."""
    starts_over: bool = True
    """Whether a plan with a thin margin has to leave room for a step to be done again with nothing cached."""
    answers: dict[Any, Any] = field(default_factory=dict)
    """What `once` keeps."""

    @staticmethod
    def of(model: Any, request: Request, lengths: Lengths | None = None) -> "Job":
        """The job of a request; where lengths are given, at the longest sample that is not cut.

        Raises:
            WorkloadError: what was asked for contradicts itself, the model or the GPU; or no budget is given.
        """
        if lengths is not None:
            lengths = _cut(model, request, lengths)
            request = replace(request, fixed={**request.fixed, "seq": lengths.longest})
        whole = {**request.fixed, "loop": "stepper", "trust_remote_code": request.trust_remote_code}
        whole |= precision_needed(whole)  # the recipes say what else there is
        traced, target = resolve_workload(model, whole)
        if target.capacity_bytes is None:
            raise WorkloadError(["a plan needs a gpu or a memory size to fit into"], hint=SIZE_HINT)
        if lengths is not None and traced.workload.is_joint and traced.workload.text_tokens is None:
            known = {"text_tokens": max(int(LEAST_OF_MEAN * mean(lengths.values)), 1)}
            request = replace(request, fixed={**request.fixed, **known})
            traced = replace(traced, workload=replace(traced.workload, **known))
        return Job(
            model=model,
            request=request,
            lengths=lengths,
            traced=traced,
            target=target,
            budget_bytes=target.capacity_bytes,
            timed_gpu=target.gpu if target.gpu is not None and has_rates(target.gpu) else _typical(),
        )

    @property
    def is_described(self) -> bool:
        """Whether what decides its plan can be written down: a configuration, and a class that transformers has."""
        return self.traced.resolved.is_of_transformers and not self.request.trust_remote_code

    def question(self) -> dict[str, Any]:
        """Everything that decides its plan besides the code."""
        resolved = self.traced.resolved
        return {
            "name": resolved.name,
            "config": resolved.config.to_json_string(),
            "head": repr(resolved.parts),
            "class": f"{resolved.model_class.__module__}.{resolved.model_class.__qualname__}",
            "request": self.request,
            "lengths": self.lengths,
            "workload": self.base,
            "teacher": self.base.teacher_written_ns if self.base.holds_teacher else None,
            "target": self.target,
            "timed_gpu": self.timed_gpu,
            "speed": speed_of(self.timed_gpu),
        }

    @property
    def base(self) -> Workload:
        """The job as it was asked for, settings left plain."""
        return self.traced.workload

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability."""
        return self.target.profile.compute_capability

    @property
    def can_checkpoint(self) -> bool:
        """Whether the model's class supports it."""
        return bool(getattr(self.traced.resolved.model_class, "supports_gradient_checkpointing", False))

    @property
    def can_pack(self) -> bool:
        """Whether sequences may lie end to end: a family that has it, and no module that would have to be changed."""
        resolved = self.traced.resolved
        has_kernel = "packed" in supported_attention(resolved.model_class) and takes_heads(resolved.config)
        return resolved.module is None and has_kernel

    def passes(self, micro_batch: int) -> int:
        """Forward passes of a step."""
        return -(-self.base.share // micro_batch)


def once(function: Callable[Concatenate[Job, P], R]) -> Callable[Concatenate[Job, P], R]:
    """A function whose answers the job keeps."""

    @wraps(function)
    def asked(job: Job, /, *args: P.args, **keywords: P.kwargs) -> R:
        key = (function.__name__, *args, *keywords.values())
        if key not in job.answers:
            job.answers[key] = function(job, *args, **keywords)
        answer: R = job.answers[key]
        return answer

    return asked


@once
def meta_model(job: Job) -> Any:
    """The model on the meta device, with nothing applied."""
    return build_for(job.traced.resolved, job.base)


@once
def num_layers(job: Job) -> int:
    """Layers that can be checkpointed."""
    return len(encoder_layers(meta_model(job)))


@once
def drawn_batches(job: Job) -> list[list[int]]:
    """Lengths of batches as they come; the same ones for every choice."""
    assert job.lengths is not None
    draw, values = Random(SEED), job.lengths.values
    num_texts = job.base.share * job.base.texts_per_sample
    is_share = job.base.is_joint and num_texts <= len(values) < FEW_BATCHES * num_texts  # an epoch has no text twice
    num = min(NUM_BATCHES, max(MOST_DRAWN // num_texts, FEWEST_BATCHES))
    return [draw.sample(values, num_texts) if is_share else draw.choices(values, k=num_texts) for _ in range(num)]


@once
def full_samples(job: Job) -> int:
    """Samples of full length that have as many tokens as most batches have on real lengths."""
    if job.lengths is None:
        return job.base.share
    tokens = sorted(sum(batch) for batch in drawn_batches(job))
    return min(-(-tokens[int(MOST_BATCHES * len(tokens))] // job.base.sample_tokens), job.base.batch)


def _cut(model: Any, request: Request, lengths: Lengths) -> Lengths:
    """The lengths, cut to what the model and the request take."""
    fixed = request.fixed
    task = {"task": fixed["task"]} if "task" in fixed else {}
    config = resolve(model, **task, trust_remote_code=request.trust_remote_code).config
    most = max_positions(config) if config is not None else None
    limits = [n for n in (most, fixed.get("seq")) if n is not None]
    return lengths.cut(min(limits)) if limits else lengths


def _typical() -> GPU:
    """Where only memory is given, times are those of the GPU whose architecture is predicted for."""
    alike = [g for g in all_gpus() if g.compute_capability == DEFAULT_ARCHITECTURE and g.peak_tf32 is not None]
    return max(alike, key=lambda g: g.num_multiprocessors)
