"""The shape of a pruned model: which layers and neurons stay, searched by what its answers on real rows lose least."""

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.models.anatomy import encoder_layers, num_layer_applications
from vramfit.runtime.data.samples import Samples
from vramfit.runtime.device import RunDevice
from vramfit.runtime.trained import TrainedModel
from vramfit.runtime.training.outcome import environment_of
from vramfit.smaller.comparison import device_name
from vramfit.smaller.neurons import (
    BATCH_ROWS,
    STEP,
    WHY_NO_HEADS,
    FeedForward,
    best_heads,
    best_neurons,
    can_have_heads,
    find_attentions,
    find_feed_forwards,
    has_own_head_size,
    inputs_of_heads,
    masked,
    measure_importance,
    set_heads,
)
from vramfit.smaller.rows import Answers, answers
from vramfit.smaller.sizes import BATCH, SEQ
from vramfit.smaller.source import saved_dtype, write_as_saved
from vramfit.smaller.students import first_is_special, keep_layers
from vramfit.stages import tell
from vramfit.units import format_bytes

RUNGS = 20
"""Shares of the parameters that are tried for a target that is predicted or measured: twentieths."""
LEAST_SHARE = 0.1
"""Of the neurons: fewer are not tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneTarget:
    """How small the model is to be; one of the first four, or layers, neurons and heads."""

    keep: float | None = None
    """Share of the parameters of the layers."""
    size_bytes: int | None = None
    """Of all weights, as they are saved."""
    memory_bytes: int | None = None
    """Predicted reserved bytes of serving a batch of 32 × 128 tokens."""
    latency_s: float | None = None
    """Measured for one row, the median of many; on this device."""
    layers: int | None = None
    neurons: int | None = None
    """Of each layer."""
    heads: int | None = None
    """Of each layer."""

    def __post_init__(self) -> None:
        sizes = [self.keep, self.size_bytes, self.memory_bytes, self.latency_s]
        given = sum(size is not None for size in sizes)
        counts = (self.layers, self.neurons)
        is_exact = self.heads is not None or None not in counts
        if given > 1 or (given and is_exact):
            raise WorkloadError(
                ["keep, size, memory, latency, layers with neurons, and heads say how small it is to be: give one"]
            )
        if not given and self.heads is None and counts == (None, None):
            raise WorkloadError(["nothing says how small the model is to be"], hint="for example: --keep 0.5")
        if self.keep is not None and not 0 < self.keep < 1:
            raise WorkloadError(
                [f"keep {self.keep:g} is not a share between 0 and 1"], hint="--keep 0.5 keeps half the parameters"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Layers and neurons of a model."""

    layers: tuple[int, ...]
    """Those that are kept, by number from 0."""
    neurons: int
    """Of each layer."""
    heads: int | None
    """Of each layer, where heads were taken out."""
    change: float
    """Of the answers: the squares of the differences, as a share of the squares of the answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """What was measured for a target in latency: medians of rows that go through alone."""

    device: str
    target_s: float
    before_s: float
    after_s: float
    num_measured: int
    """Models that were measured, the whole one too."""


Measure = Callable[[TrainedModel, Samples], float]
"""Seconds of one row of a model in a folder."""


class ShapeSearch:
    """Which layers and neurons are kept.

    Args:
        model: the whole one.
        samples: rows that neurons are measured on.
        few: rows that layers and shapes are tried on.
        heads: that each layer is to keep; None keeps all.
    """

    def __init__(self, model: Any, trained: TrainedModel, samples: Samples, few: Samples, heads: int | None) -> None:
        self.samples, self.few = samples, few
        self._model, self._trained = model, trained
        self._fields, self._parts = find_feed_forwards(model)
        self._layers = encoder_layers(model)
        self._heads, attentions = heads, list[FeedForward]()
        if heads is not None:
            self._check_heads(heads)
            attentions = find_attentions(model)
        tell("measuring neurons")
        self._masked = [*self._parts, *attentions]
        self._importance = measure_importance(model, self._masked, samples, BATCH_ROWS)
        self._answers = list(answers(model, few, BATCH_ROWS))
        self._order: list[int] = []
        """Layers in the order in which they are removed, as far as it is known."""

    @property
    def _first(self) -> FeedForward:
        return self._parts[0]

    def find(self, target: PruneTarget) -> tuple[Shape, tuple[Shape, ...]]:
        """The shape whose answers change least, of those that are small enough; and all that were tried.

        Raises:
            WorkloadError: none is.
        """
        return self._best(list(self._wanted(target)))

    def find_fast(
        self, target: PruneTarget, most_s: float, measure: Measure
    ) -> tuple[Shape, tuple[Shape, ...], Latencies]:
        """The same of the largest share of the parameters with which a row takes so many seconds at most.

        Shares are bisected: a smaller one is taken to be no slower.

        Raises:
            WorkloadError: none is fast enough, or the whole model is.
        """
        self._check_counts(target)
        before_s = measure(self._trained, self.samples)
        if before_s <= most_s:
            raise WorkloadError([f"a row takes {_ms(before_s)}, no more than {_ms(most_s)}: nothing is pruned"])
        whole = self._num_parameters(len(self._layers), self._first.num_neurons)
        shares = [tuple(self._within(target, whole * rung // RUNGS)) for rung in range(1, RUNGS)]
        ladder = list(dict.fromkeys(filter(None, shares)))
        best, taken = None, [before_s]
        low, high = 0, len(ladder)
        while low < high:
            middle = (low + high) // 2
            shape, compared = self._best(ladder[middle])
            taken.append(self._measured(shape, measure))
            if taken[-1] <= most_s:
                best, low = (shape, compared, taken[-1]), middle + 1
            else:
                high = middle
        if best is None:
            raise WorkloadError(
                [f"a row takes {_ms(min(taken))} in the fastest shape that was measured, more than {_ms(most_s)}"],
                hint="ask for more time, take fewer layers (--layers), or distil a smaller model: vramfit distill",
            )
        device = RunDevice(None)
        found = Latencies(
            device=device_name(device, environment_of(device)),
            target_s=most_s,
            before_s=before_s,
            after_s=best[2],
            num_measured=len(taken),
        )
        return best[0], best[1], found

    def _measured(self, shape: Shape, measure: Measure) -> float:
        """Seconds of one row of a folder with this shape."""
        with tempfile.TemporaryDirectory() as folder:
            model = copy.deepcopy(self._model)
            self.cut(model, shape)
            write_as_saved(model, self._trained, Path(folder))
            return measure(replace(self._trained, model=folder), self.samples)

    def _best(self, wanted: Sequence[tuple[int, int]]) -> tuple[Shape, tuple[Shape, ...]]:
        tried = []
        for num_layers, num_neurons in wanted:
            tell(f"trying {num_layers} layers of {num_neurons} neurons")
            removed = set(self._removed(len(self._layers) - num_layers))
            kept = tuple(place for place in range(len(self._layers)) if place not in removed)
            change = self._change(num_neurons, removed)
            tried.append(Shape(layers=kept, neurons=num_neurons, heads=self._heads, change=change))
        return min(tried, key=lambda shape: shape.change), tuple(tried)

    def masked_answers(self, shape: Shape) -> list[Answers]:
        """What the whole model answers as if it had this shape."""
        removed = set(range(len(self._layers))) - set(shape.layers)
        with masked(self._model, self._masked, self._kept(shape.neurons), removed):
            return list(answers(self._model, self.few, BATCH_ROWS))

    def cut(self, model: Any, shape: Shape) -> None:
        """Give the whole model, or a copy of it, this shape for good."""
        kept, parts = self._kept(shape.neurons), find_feed_forwards(model)[1]
        if self._heads is not None:
            parts += find_attentions(model)
            set_heads(model.config, self._heads)
        for part, numbers in zip(parts, kept, strict=True):
            part.keep(numbers)
        for name in self._fields:
            setattr(model.config, name, shape.neurons)
        if len(shape.layers) < len(encoder_layers(model)):
            keep_layers(model, shape.layers)

    def _wanted(self, target: PruneTarget) -> Iterator[tuple[int, int]]:
        """Layers and neurons of every shape that is small enough and no smaller."""
        self._check_counts(target)
        num_layers, num_neurons = len(self._layers), self._first.num_neurons
        budget = self._budget(target)
        if budget is None:
            found = [(target.layers or num_layers, target.neurons or num_neurons)]
        else:
            found = self._within(target, budget)
        if target.memory_bytes is not None:
            found = [shape for shape in found if self._predicted(*shape) <= target.memory_bytes]
        if not found:
            least = self._num_parameters(*self._least(target))
            raise WorkloadError(
                [f"the layers cannot be pruned to {budget:,} parameters: the fewest that are tried are {least:,}"],
                hint="ask for more, or distil a smaller model: vramfit distill",
            )
        keeps_heads = self._heads in (None, self._model.config.num_attention_heads)
        if (num_layers, num_neurons) in found and keeps_heads:
            raise WorkloadError(["the model is as small as that already: nothing is pruned"])
        yield from found

    def _check_counts(self, target: PruneTarget) -> None:
        """Refuse layers and neurons that the model does not have."""
        num_layers, num_neurons = len(self._layers), self._first.num_neurons
        if target.layers is not None and num_layers < num_layer_applications(self._model):
            raise WorkloadError(["layers of this model share their weights: none can be taken out"])
        for name, asked, most in (("layers", target.layers, num_layers), ("neurons", target.neurons, num_neurons)):
            if asked is not None and not 1 <= asked <= most:
                raise WorkloadError([f"{name} {asked}: the model has {most} {name}, and keeps 1 to {most}"])

    def _within(self, target: PruneTarget, budget: int) -> list[tuple[int, int]]:
        """Layers and neurons of the shapes that have as many parameters as a budget lets them."""
        counts = self._counts(target)
        found = [(count, n) for count in counts if (n := target.neurons or self._neurons(count, budget))]
        return [(count, n) for count, n in found if self._num_parameters(count, n) <= budget]

    def _counts(self, target: PruneTarget) -> Sequence[int]:
        """Numbers of layers that may be kept."""
        return self._possible_layers() if target.layers is None else [target.layers]

    def _budget(self, target: PruneTarget) -> int | None:
        """Parameters that the layers may have; None where layers and neurons are given."""
        whole = self._num_parameters(len(self._layers), self._first.num_neurons)
        if target.keep is not None:
            return int(target.keep * whole)
        if target.size_bytes is not None:
            outside = sum(p.numel() for p in self._model.parameters()) - whole
            element_bytes = saved_dtype(self._trained).itemsize
            fits: int = target.size_bytes // element_bytes - outside
            if fits <= 0:
                raise WorkloadError(
                    [f"embeddings and head alone are {format_bytes(outside * element_bytes)}"],
                    hint="trim the vocabulary too: vramfit trim",
                )
            return min(fits, whole)
        if target.memory_bytes is not None:
            return self._fitting(target, target.memory_bytes, whole)
        return None

    def _fitting(self, target: PruneTarget, memory_bytes: int, whole: int) -> int:
        """Parameters of layers with which serving is predicted to fit."""
        least = self._least(target)
        for budget in (*(whole * rung // RUNGS for rung in range(RUNGS, 0, -1)), self._num_parameters(*least)):
            shapes = self._within(target, budget)
            if shapes and self._predicted(*max(shapes)) <= memory_bytes:
                return budget
        takes, asked = format_bytes(self._predicted(*least)), format_bytes(memory_bytes)
        raise WorkloadError(
            [f"with the fewest layers and neurons that are tried, serving takes {takes}, more than {asked}"],
            hint="ask for more, or trim the vocabulary: vramfit trim",
        )

    def _predicted(self, num_layers: int, num_neurons: int) -> int:
        """Reserved bytes of serving a model of this shape."""
        config = copy.deepcopy(self._model.config)
        for name, value in vars(config).items():
            if isinstance(value, list) and len(value) == len(self._layers):  # such as layer_types
                setattr(config, name, value[:num_layers])
        for name in self._fields:
            setattr(config, name, num_neurons)
        if num_layers < len(self._layers):
            config.num_hidden_layers = num_layers
        job: dict[str, Any] = {"mode": "infer", "batch": BATCH, "seq": min(SEQ, self._trained.max_length)}
        return estimate(config, task=self._trained.task, **job).safe_reserved_bytes

    def _possible_layers(self) -> range:
        """Numbers of layers that can be kept."""
        most = len(self._layers)
        is_shared = most < num_layer_applications(self._model)
        return range(most if is_shared else 1 + first_is_special(self._layers), most + 1)

    @property
    def _least_neurons(self) -> int:
        least = int(LEAST_SHARE * self._first.num_neurons)
        return max(least - least % STEP, min(STEP, self._first.num_neurons))

    def _least(self, target: PruneTarget) -> tuple[int, int]:
        """Layers and neurons of the smallest shape that is tried."""
        return min(self._counts(target)), target.neurons or self._least_neurons

    def _neurons(self, num_layers: int, budget: int) -> int:
        """The most neurons with which so many layers are within a budget; 0 where too few are."""
        spare = budget // num_layers - self._num_parameters(1, 0)
        most = min(spare // self._first.parameters_of_neuron, self._first.num_neurons)
        most -= most % STEP if most < self._first.num_neurons else 0
        return most if most >= self._least_neurons else 0

    def _num_parameters(self, num_layers: int, num_neurons: int) -> int:
        """Of so many layers."""
        one = sum(p.numel() for p in self._layers[-1].parameters())
        return num_layers * (one - (self._first.num_neurons - num_neurons) * self._first.parameters_of_neuron)

    def _removed(self, count: int) -> list[int]:
        """The layers to remove: again and again the one without which the answers change least."""
        places = range(int(first_is_special(self._layers)), len(self._layers))
        while len(self._order) < count:
            tell(f"choosing layer {len(self._order) + 1} of {count} to remove")
            left = [place for place in places if place not in self._order]
            changes = {place: self._change(self._first.num_neurons, {*self._order, place}) for place in left}
            self._order.append(min(left, key=lambda place: changes[place]))
        return self._order[:count]

    def _change(self, num_neurons: int, removed: set[int]) -> float:
        changed, whole = 0.0, 0.0
        with masked(self._model, self._masked, self._kept(num_neurons), removed):
            for a, b in zip(self._answers, answers(self._model, self.few, BATCH_ROWS), strict=True):
                changed += sum(float((a[name] - b[name]).square().sum()) for name in a)
                whole += sum(float(value.square().sum()) for value in a.values())
        return changed / whole

    def _kept(self, num_neurons: int) -> list[torch.Tensor]:
        """Neurons of each layer, and then what heads it has."""
        num_layers = len(self._layers)
        kept = best_neurons(self._importance[:num_layers], num_neurons)
        if self._heads is not None:
            config = self._model.config
            heads = best_heads(self._importance[num_layers:], config.num_attention_heads, self._heads)
            kept += [inputs_of_heads(one, config.head_dim) for one in heads]
        return kept

    def _check_heads(self, heads: int) -> None:
        """Refuse heads that the model does not have, or that its configuration cannot say."""
        config = self._model.config
        if not has_own_head_size(config):
            raise WorkloadError(
                [f"heads of {config.model_type} models cannot be taken out. {WHY_NO_HEADS}"],
                hint="take out layers or neurons: --layers N, --neurons N",
            )
        most = config.num_attention_heads
        possible = [count for count in range(1, most + 1) if can_have_heads(config, count)]
        if heads not in possible:
            raise WorkloadError(
                [f"heads {heads}: the model has {most} heads"],
                hint=f"numbers that its configuration can say: {', '.join(map(str, possible))}",
            )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"
