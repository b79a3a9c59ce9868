"""How many layers stay on the device, so that weights and activations together fit: found by predicting."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vramfit.estimator.peak import peak_requested
from vramfit.estimator.target import Target
from vramfit.estimator.traced import TracedWorkload
from vramfit.estimator.weighing import weigh
from vramfit.models.anatomy import encoder_layers
from vramfit.models.build import build_meta
from vramfit.techniques import offloading
from vramfit.techniques.application import apply
from vramfit.techniques.quantization import inner_tensors
from vramfit.trace.template import StreamTemplate


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
        model = build_meta(self.resolved, attention=self.workload.attention)
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
