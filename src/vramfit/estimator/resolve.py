"""From a model and keywords to a workload that can be predicted; every problem at once."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.estimator.target import Target, target_of
from vramfit.estimator.traced import TracedWorkload
from vramfit.estimator.weighing import peak_requested, weigh
from vramfit.models.anatomy import encoder_layers, max_positions
from vramfit.models.build import build_for, missing_kernel, with_attention
from vramfit.models.resolve import ResolvedModel, resolve
from vramfit.settings import conflicts
from vramfit.tasks import find_task
from vramfit.techniques import offloading
from vramfit.techniques.application import apply
from vramfit.techniques.packing.attention import takes_heads
from vramfit.techniques.quantization import inner_tensors
from vramfit.trace.template import StreamTemplate
from vramfit.workload import Workload, switched


def settle_offload(traced: TracedWorkload, target: Target) -> TracedWorkload:
    """The inference with as many resident layers as its capacity allows; none where there is no capacity to fit."""
    if target.capacity_bytes is None:
        return traced
    return OffloadedWorkload(traced.workload, traced.resolved, traced.profile, capacity_bytes=target.capacity_bytes)


@dataclass(frozen=True, slots=True)
class OffloadedWorkload(TracedWorkload):
    """A workload whose resident layers are as many as a capacity allows, settled for each batch.

    Where not even the workload without resident layers fits, it has none, and its estimate says so.
    """

    capacity_bytes: int = 0
    settled: dict[int, int] = field(default_factory=dict, init=False, compare=False)
    """Micro-batch → layers that stay, where that is known."""

    def template(self, micro_batch: int) -> StreamTemplate:
        return self._with(self.resident_layers(micro_batch)).template(micro_batch)

    def resident_layers(self, micro_batch: int) -> int:
        """The most layers that can stay on the device at a micro-batch."""
        if micro_batch not in self.settled:
            stream = self._with(0).stream(micro_batch)
            spare_bytes = self.capacity_bytes - peak_requested(stream)
            worth_trying = [n for n, more_bytes in self._candidates() if more_bytes <= spare_bytes]
            self.settled[micro_batch] = _most(worth_trying, lambda n: self._fits(n, micro_batch))
        return self.settled[micro_batch]

    def _with(self, num_resident: int) -> TracedWorkload:
        return TracedWorkload(self.workload, self.resolved, self.profile, num_resident)

    def _fits(self, num_resident: int, micro_batch: int) -> bool:
        stream = self._with(num_resident).stream(micro_batch)
        outcome = weigh(stream, self.options, self.capacity_bytes)
        return bool(outcome.fits) and outcome.num_retries == 0

    def _candidates(self) -> list[tuple[int, int]]:
        """Numbers of resident layers, fewest first, each with what it requests beyond none at all.

        With one or two layers offloaded, their slots take as much as the layers: those numbers save nothing.
        """
        model = build_for(self.resolved, self.workload)
        apply(model, self.workload)
        layers = encoder_layers(model)
        parts = [[part for p in layer.parameters() for _, part in inner_tensors(p)] for layer in layers]
        sizes = [sum(part.numel() * part.element_size() for part in inside) for inside in parts]
        slots = min(offloading.NUM_SLOTS, len(layers)) * max(map(offloading.device_bytes, parts), default=0)
        some = range(1, len(layers) - offloading.NUM_SLOTS)
        return [(n, sum(sizes[:n])) for n in some] + [(len(layers), sum(sizes) - slots)]


def _most(candidates: list[int], fits: Callable[[int], bool]) -> int:
    """The largest candidate that fits, or none (0): the last two are tried, then halves, each costing a trace."""
    for last in reversed(candidates[-2:]):
        if fits(last):
            return last
    low, high = 0, len(candidates) - 2  # of the first `low` the last fits; from `high` on none does
    while low < high:
        middle = (low + high) // 2
        if fits(candidates[middle]):
            low = middle + 1
        else:
            high = middle
    return candidates[low - 1] if low > 0 else 0


def resolve_workload(model: Any, keywords: dict[str, Any]) -> tuple[TracedWorkload, Target]:
    """A workload checked against its model and its GPU.

    Args:
        model: a name, a folder, a hub id, a configuration or an `nn.Module`.
        keywords: fields of `Workload`, and `trust_remote_code`.

    Raises:
        WorkloadError: everything that does not go together.
        UnknownModel, UnknownGPU: no such name.
    """
    trust = keywords.get("trust_remote_code", False)
    if problems := switched("trust_remote_code", trust):
        raise WorkloadError(problems)
    given = {name: value for name, value in keywords.items() if name != "trust_remote_code"}
    name = model if isinstance(model, str) and model else type(model).__name__
    workload = Workload.from_keywords(model=name, **given)
    resolved = resolve(model, task=workload.task, num_labels=workload.num_labels, trust_remote_code=trust)
    problems = _beyond_the_model(workload, resolved)
    target = _target(workload, problems)
    if target is None or problems:
        raise WorkloadError(problems)
    workload = with_attention(replace(workload, model=resolved.name, task=resolved.task), resolved)
    traced = TracedWorkload(workload, resolved, target.profile)
    waits = workload.offloads_layers and not workload.trains  # in training, all layers do
    return (settle_offload(traced, target) if waits else traced), target


def _target(workload: Workload, problems: list[str]) -> Target | None:
    """Where the workload is to run; what it asks of a GPU that does not have it is added to the problems."""
    try:
        target = target_of(workload)
    except WorkloadError as error:
        problems += error.problems
        return None
    name = "the GPU" if target.gpu is None else target.gpu.name
    problems += conflicts(workload, target.profile.compute_capability, name)
    return target


def _beyond_the_model(workload: Workload, resolved: ResolvedModel) -> list[str]:
    """What the workload asks of this model that it does not have."""
    why_no_loss = find_task(workload.task).why_no_loss
    problems = [why_no_loss] if why_no_loss and workload.trains and resolved.module is None else []
    longest = max_positions(resolved.config) if resolved.config is not None else None
    if longest is not None and workload.seq > longest:
        problems.append(
            f"seq {workload.seq} is beyond the {longest} positions of {resolved.name}: take {longest} or fewer"
        )
    problems += missing_kernel(resolved, workload)
    if workload.is_packed and not takes_heads(resolved.config):
        problems.append(
            f"attention packed: the flash kernel takes heads of 8, 16, … 256, and {resolved.name} has others"
        )
    return problems
