"""`Bench`: predictions of recipes at micro-batches, each made once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vramfit.devices.catalogue import DEFAULT_ARCHITECTURE, GPU, all_gpus
from vramfit.errors import WorkloadError
from vramfit.estimator.predict import estimate_at
from vramfit.estimator.resolve import resolve_workload
from vramfit.estimator.shallow import WorkByLength, least_peaks
from vramfit.estimator.target import Target, target_of
from vramfit.estimator.timing import Timed, time_workload
from vramfit.estimator.traced import TracedWorkload
from vramfit.estimator.weighing import peaks_of_parts, restart_bytes, weigh
from vramfit.models.anatomy import encoder_layers
from vramfit.models.build import build_meta
from vramfit.models.tasks import supported_attention
from vramfit.planner.floor import Shapes
from vramfit.planner.request import Request
from vramfit.planner.space import PRICES, REHEARSED, Recipe
from vramfit.records.estimate import Basis, Estimate
from vramfit.records.stream import Stream
from vramfit.settings import TRITON_CAPABILITY
from vramfit.techniques import casting, fusing
from vramfit.techniques.packed_attention import takes_heads
from vramfit.workload import SIZE_HINT, Workload

PROBED_PASSES = 2
"""Micro-batches of a step that is only looked at: the first makes the gradients, all others are like the second."""
MUCH_SMALLER = 0.75
ANY_BATCH = 2
"""A trace at this size serves every other one."""


@dataclass(frozen=True, slots=True)
class Peek:
    """A look at settings: what their tensors ask for, and how long a step takes."""

    requested_bytes: int
    step_time_s: float
    floor_bytes: int
    """What the optimizer's step asks for, whatever the micro-batch."""


class Bench:
    """One job on one GPU; everything asked of it is kept.

    Args:
        model: as `estimate` takes it.
        request: what is fixed.

    Raises:
        WorkloadError: what was asked for contradicts itself, the model or the GPU; or no budget is given.
    """

    def __init__(self, model: Any, request: Request) -> None:
        self.model = model
        self.request = request
        keywords = {k: v for k, v in request.fixed.items() if k not in ("micro_batch", "accumulate")}
        whole = {**request.fixed, "loop": "stepper", "trust_remote_code": request.trust_remote_code}
        if whole.get("attention") == "packed":
            whole.setdefault("precision", "amp-bf16")  # its kernel takes no other; the recipes say what else there is
        self._base, self.target = resolve_workload(model, whole)
        if self.target.capacity_bytes is None:
            raise WorkloadError(["a plan needs a gpu or a memory size to fit into"], hint=SIZE_HINT)
        self.budget_bytes: int = self.target.capacity_bytes
        self.fixed: Mapping[str, Any] = keywords
        self.timed_gpu = self.target.gpu or _typical()
        self.num_predicted = 0
        self.full_samples: int | None = None
        """Samples of full length that have as many tokens as a batch has on real lengths: what packed rows hold."""
        self.starts_over = True
        """Whether a plan with a thin margin has to leave room for a step to be done again with nothing cached."""
        self.has_refused = False
        """Whether one was refused for that."""
        self._layers: int | None = None
        self._casts = self._fuses = False
        self._shapes: dict[Recipe, Shapes] = {}
        self._peeks: dict[tuple[Recipe, int], Peek] = {}
        self._safe: dict[tuple[Recipe, int], int] = {}
        self._least: dict[tuple[Recipe, int, int], dict[str, int]] = {}
        self._traced: dict[tuple[Recipe, int], TracedWorkload] = {}
        self._by_length: dict[Recipe, WorkByLength] = {}

    @property
    def base(self) -> Workload:
        """The job as it was asked for, settings left plain."""
        return self._base.workload

    @property
    def batch(self) -> int:
        """Samples of an optimizer step."""
        return self.base.batch

    @property
    def share(self) -> int:
        """Samples of it that one GPU passes."""
        return self.base.share

    @property
    def num_layers(self) -> int:
        """Layers that can be checkpointed."""
        if self._layers is None:
            model = build_meta(self._base.resolved, attention=self.base.attention)
            self._layers, self._casts = len(encoder_layers(model)), casting.can_be(model)
            self._fuses = fusing.can_be(model)
        return self._layers

    @property
    def casts(self) -> str:
        """How the casts of autocast can be made, whatever else is done."""
        return "together" if self.num_layers and self._casts and not self.base.shards else "each"

    @property
    def can_fuse(self) -> bool:
        """Whether layers can and may be one function each, whatever else is done."""
        if self.request.fused is False or self.request.exact or self.base.num_gpus > 1:
            return False
        return self.target.profile.compute_capability >= TRITON_CAPABILITY and bool(self.num_layers) and self._fuses

    @property
    def can_checkpoint(self) -> bool:
        """Whether the model's class supports it."""
        return bool(getattr(self._base.resolved.model_class, "supports_gradient_checkpointing", False))

    @property
    def can_pack(self) -> bool:
        """Whether sequences may lie end to end: a family that has it, and no module that would have to be changed."""
        resolved = self._base.resolved
        has_kernel = "packed" in supported_attention(resolved.model_class) and takes_heads(resolved.config)
        return resolved.module is None and has_kernel

    def basis(self, *, packs: bool, compiles: bool) -> Basis:
        """Whether such predictions were compared with measurements."""
        attention = "packed" if packs else self.base.attention
        return target_of(replace(self.base, attention=attention, compile=compiles)).basis

    def passes(self, micro_batch: int) -> int:
        """Forward passes of a step."""
        return -(-self.share // micro_batch)

    def is_lean(self, micro_batch: int) -> bool:
        """Whether no full pass goes forward beside gradients: there is one, or a second that is much smaller."""
        rest = self.share - micro_batch
        return rest <= 0 or (self.passes(micro_batch) == PROBED_PASSES and rest < MUCH_SMALLER * micro_batch)

    def timed_batch(self, recipe: Recipe) -> int:
        """Samples of full length that go through a GPU in a step."""
        return self.full_samples or self.share if recipe.attention == "packed" else self.share

    def price(self, recipe: Recipe) -> float:
        """What a recipe's time counts for beside simpler settings."""
        return recipe.price_by(REHEARSED if self.request.rehearses else PRICES)

    def floor_bytes(self, recipe: Recipe) -> int:
        """What is held at least, whatever the split and the checkpointing: known without a trace, or by a short one."""
        precision = recipe.precision if recipe.precision == "bf16" else "fp32"  # of the weights
        shaped = replace(recipe, precision=precision, optimizer="sgd", checkpointing=None, offload=None)
        shaped = replace(shaped, compile=False, graphs=False)
        if shaped not in self._shapes:
            self._shapes[shaped] = Shapes.of(self.traced(shaped, 1))
        if recipe.offload == "weights":
            return self._least_peaks(recipe, 1, ANY_BATCH if self.share > 1 else 1).get("optimizer", 0)
        if recipe.offload is not None:
            return self._shapes[shaped].weight_bytes
        num_parts = self.base.num_gpus if self.base.shards else 1
        return self._shapes[shaped].floor_bytes(recipe.optimizer) // num_parts

    def least_bytes(self, recipe: Recipe, micro_batch: int) -> int:
        """What is asked for at least at a micro-batch, by a short trace; 0 where that says nothing."""
        return max(self._least_peaks(recipe, micro_batch, micro_batch).values(), default=0)

    def _least_peaks(self, recipe: Recipe, micro_batch: int, traced_at: int) -> dict[str, int]:
        key = (recipe, micro_batch, traced_at)
        if key not in self._least:
            traced = self.traced(recipe, min(self.passes(micro_batch), PROBED_PASSES))
            self._least[key] = least_peaks(traced, micro_batch, traced_at)
        return self._least[key]

    def fits_host(self, recipe: Recipe) -> bool:
        """Whether what waits in host memory is within what was given for it."""
        limit = self.base.host_memory
        return limit is None or recipe.offload is None or self.host_bytes(recipe) <= limit

    def host_bytes(self, recipe: Recipe) -> int:
        """What waits in host memory, at the least."""
        return self.traced(recipe, 1).template(ANY_BATCH).host_bytes_at(1)

    def peek(self, recipe: Recipe, micro_batch: int) -> Peek:
        """A quick look, from a trace that serves every micro-batch; as of several passes, also where one does."""
        key = (recipe, micro_batch)
        if key not in self._peeks:
            several = self.share > 1
            traced = self.traced(recipe, PROBED_PASSES if several else 1)
            template = traced.template(max(micro_batch, ANY_BATCH) if several else micro_batch)
            stream = template.instantiate(micro_batch, traced.order(num_steady=1))
            seconds = self._seconds(template, recipe, micro_batch, self.timed_batch(recipe))
            peaks = peaks_of_parts(stream)
            self._peeks[key] = Peek(max(peaks.values()), seconds, peaks["optimizer"])
            self.num_predicted += 1
        return self._peeks[key]

    def safe_bytes(self, recipe: Recipe, micro_batch: int) -> int:
        """What is reserved at most, wherever segments lie: two steps replayed."""
        key = (recipe, micro_batch)
        if key not in self._safe:
            self._safe[key] = weigh(*self.two_steps(recipe, micro_batch), None).safe_reserved_bytes
            self.num_predicted += 1
        return self._safe[key]

    def can_start_over(self, recipe: Recipe, micro_batch: int) -> bool:
        """Whether a step can be done again inside the budget when nothing is cached any more."""
        return restart_bytes(*self.two_steps(recipe, micro_batch)) <= self.budget_bytes

    def two_steps(self, recipe: Recipe, micro_batch: int) -> tuple[Stream, Any]:
        """What they ask for, and the options of the allocator; of two passes, the second is as small as it will be."""
        passes = self.passes(micro_batch)
        traced = self.traced(recipe, min(passes, PROBED_PASSES))
        whole = replace(traced, workload=self.workload(recipe, micro_batch)) if passes == PROBED_PASSES else traced
        return traced.template(micro_batch).instantiate(micro_batch, whole.order(1, micro_batch)), traced.options

    def correct(self, recipe: Recipe, micro_batch: int, safe_bytes: int) -> None:
        """Keep what a whole prediction found in place of a quick one."""
        self._safe[recipe, micro_batch] = safe_bytes

    def weight_bytes(self, recipe: Recipe) -> int:
        """What the weights ask for, which no recipe's gradients exceed."""
        stream = self.traced(recipe, PROBED_PASSES if self.share > 1 else 1).stream(ANY_BATCH, num_steady=1)
        end = next(index for index, part in stream.parts if part != "load")
        return sum(event for event in stream.events[:end] if event > 0)

    def step_time(self, recipe: Recipe, micro_batch: int) -> float:
        """Seconds of a step by the very trace that it has, of packed rows on real lengths."""
        traced = self.traced(recipe, min(self.passes(micro_batch), PROBED_PASSES))
        return self._seconds(traced.template(micro_batch), recipe, micro_batch, self.timed_batch(recipe))

    def full_time(self, recipe: Recipe, micro_batch: int) -> float:
        """Seconds of a step whose samples are all of full length."""
        traced = self.traced(recipe, min(self.passes(micro_batch), PROBED_PASSES))
        return self._seconds(traced.template(micro_batch), recipe, micro_batch, self.share)

    def host_share(self, recipe: Recipe, micro_batch: int) -> float:
        """How long the host is busy in a step, as a share of the device's time; of packed rows on real lengths."""
        template = self.traced(recipe, min(self.passes(micro_batch), PROBED_PASSES)).template(micro_batch)
        step = self._timed(template, self._split(recipe, micro_batch, self.timed_batch(recipe)), micro_batch).step
        return step.host_s / max(sum(step.device_s.values()), step.seconds / 1000)

    def _seconds(self, template: Any, recipe: Recipe, micro_batch: int, batch: int) -> float:
        return self.seconds(template, self._split(recipe, micro_batch, batch), micro_batch)

    def _split(self, recipe: Recipe, micro_batch: int, batch: int) -> Workload:
        """A step of so many samples of full length."""
        split: dict[str, Any] = {"batch": batch * self.base.num_gpus, "micro_batch": min(micro_batch, batch)}
        split["accumulate"] = None
        return replace(self.base, **recipe.keywords(), **split)

    def estimate(self, recipe: Recipe, micro_batch: int) -> Estimate:
        """The whole prediction, inside the budget."""
        traced, target = self.resolve(recipe, micro_batch)
        return estimate_at(traced, target, micro_batch)

    def resolve(self, recipe: Recipe, micro_batch: int) -> tuple[TracedWorkload, Target]:
        """The job as it would run."""
        chosen = {**self.fixed, **recipe.keywords(), "batch": self.batch, "micro_batch": micro_batch}
        chosen |= {"loop": "stepper", "trust_remote_code": self.request.trust_remote_code}
        return resolve_workload(self.model, chosen)

    def workload(self, recipe: Recipe, micro_batch: int) -> Workload:
        """The job as a workload."""
        return replace(self.base, **recipe.keywords(), micro_batch=micro_batch, accumulate=None)

    def traced(self, recipe: Recipe, num_passes: int) -> TracedWorkload:
        """A job of so many micro-batches; their size is filled in later."""
        key = (recipe, num_passes)
        if key not in self._traced:
            batch = num_passes * self.base.num_gpus
            workload = replace(self.base, **recipe.keywords(), batch=batch, accumulate=num_passes, micro_batch=None)
            most = self.share if recipe.attention == "packed" else None  # short ones may all go into one row
            self._traced[key] = replace(self._base, workload=workload, num_sequences=most)
        return self._traced[key]

    def work_by_length(self, recipe: Recipe) -> WorkByLength:
        """What passes of a recipe do where they are shorter."""
        if recipe not in self._by_length:
            self._by_length[recipe] = WorkByLength(self.traced(recipe, PROBED_PASSES), ANY_BATCH)
        return self._by_length[recipe]

    def knows_work_by_length(self, recipe: Recipe) -> bool:
        """Whether shorter passes of a recipe have been looked at."""
        return recipe in self._by_length

    def seconds(self, template: Any, workload: Workload, micro_batch: int) -> float:
        """Seconds of a step on the GPU; on a usual one where its rates are not known."""
        return self._timed(template, workload, micro_batch).step.seconds

    def _timed(self, template: Any, workload: Workload, micro_batch: int) -> Timed:
        timed = time_workload(template, workload, micro_batch, replace(self.target, gpu=self.timed_gpu))
        if timed is None:
            self.timed_gpu = _typical()
            return self._timed(template, workload, micro_batch)
        return timed


def _typical() -> GPU:
    """Where only memory is given, times are those of the GPU whose architecture is predicted for."""
    alike = [g for g in all_gpus() if g.compute_capability == DEFAULT_ARCHITECTURE and g.peak_tf32 is not None]
    return max(alike, key=lambda g: g.num_multiprocessors)
