"""`prune`: a model with fewer layers and fewer neurons in each, chosen by what its answers on real rows lose least."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import VramfitError, WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.models.anatomy import encoder_layers, num_layer_applications
from vramfit.runtime.data.samples import Samples
from vramfit.runtime.trained import TrainedModel
from vramfit.smaller.folder import check_output, fresh_folder
from vramfit.smaller.neurons import FeedForward, best_neurons, find_feed_forwards, masked, measure_importance
from vramfit.smaller.rows import Answers, Rows, answers, difference, make_samples
from vramfit.smaller.sizes import BATCH, SEQ, Sizes, sizes_of
from vramfit.smaller.source import Source, load_answering, saved_dtype, write_as_saved
from vramfit.smaller.students import keep_layers
from vramfit.stages import tell
from vramfit.units import format_bytes

NUM_ROWS = 256
"""Rows that importance is measured on, where nothing else is asked for."""
NUM_TRIED = 64
"""Of them, rows on which numbers of layers are tried beside each other."""
BATCH_ROWS = 16
STEP = 8
"""Neurons of a layer are a multiple of this, which kernels like."""
LEAST_SHARE = 0.1
"""Of the neurons: fewer are not tried."""
MAX_DIFFERENCE = 1e-4
"""Between the answers of the folder that was written and of the model with masks."""
WHY_NO_HEADS = (
    "Attention heads are kept: in a configuration of transformers the size of a head is the hidden size divided by the "
    "number of heads, so fewer heads of the same size cannot be said."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneTarget:
    """How small the model is to be; one of the first three, or layers and neurons."""

    keep: float | None = None
    """Share of the parameters of the layers."""
    size_bytes: int | None = None
    """Of all weights, as they are saved."""
    memory_bytes: int | None = None
    """Predicted reserved bytes of serving a batch of 32 × 128 tokens."""
    layers: int | None = None
    neurons: int | None = None
    """Of each layer."""

    def __post_init__(self) -> None:
        sizes = [self.keep, self.size_bytes, self.memory_bytes]
        given = sum(size is not None for size in sizes)
        counts = (self.layers, self.neurons)
        if given > 1 or (given and all(count is not None for count in counts)):
            raise WorkloadError(["keep, size and memory, or layers with neurons, say how small it is to be: give one"])
        if not given and counts == (None, None):
            raise WorkloadError(["nothing says how small the model is to be"], hint="for example: --keep 0.5")
        if self.keep is not None and not 0 < self.keep < 1:
            raise WorkloadError(
                [f"keep {self.keep:g} is not a share between 0 and 1"], hint="--keep 0.5 keeps half the parameters"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneRequest:
    """What is to be pruned."""

    source: Source
    output: Path
    data: tuple[str, ...]
    """Files of rows that importance is measured on."""
    target: PruneTarget
    text_columns: tuple[str, ...] = ()
    max_rows: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Layers and neurons of a model."""

    layers: tuple[int, ...]
    """Those that are kept, by number from 0."""
    neurons: int
    """Of each layer."""
    change: float
    """Of the answers: the squares of the differences, as a share of the squares of the answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneReport:
    """What came of it."""

    model: str
    output: str
    num_rows: int
    """Rows that importance was measured on."""
    shape: Shape
    tried: tuple[Shape, ...]
    """All that were compared, the chosen one too."""
    max_difference: float
    """Between the answers of the folder and of the model with masks."""
    before: Sizes
    after: Sizes


def prune(request: PruneRequest) -> PruneReport:
    """Write a model with fewer layers and neurons, as a folder without masks.

    Raises:
        WorkloadError: a family that cannot be pruned, or a target that it cannot reach.
        DataError: data that cannot be read, or has no texts.
        CheckpointError, UnknownModel: no model there, or no tokenizer.
        VramfitError: the output is there already, or what was written answers otherwise than the masked model.
    """
    check_output(request.output)
    trained = request.source.open()
    rows = Rows(files=request.data, task=trained.task, text_columns=request.text_columns, max_rows=request.max_rows)
    references = rows.first(request.max_rows or NUM_ROWS)
    model = load_answering(trained)
    before = sizes_of(trained, model)
    search = _Search(model, trained, make_samples(references, trained), make_samples(references[:NUM_TRIED], trained))
    shape, tried = search.find(request.target)
    expected = search.masked_answers(shape)
    with fresh_folder(request.output) as folder:
        search.cut(shape)
        write_as_saved(model, trained, folder)
        smaller = replace(trained, model=str(folder))
        model = load_answering(smaller)
        found = max(difference(a, b) for a, b in zip(expected, answers(model, search.few, BATCH_ROWS), strict=True))
        if not found <= MAX_DIFFERENCE:
            raise VramfitError(
                f"the folder answers otherwise than the model with masks, by up to {found:.3g}",
                hint="nothing was written; please report the family: this is a bug in vramfit",
            )
        after = sizes_of(smaller, model)
    return PruneReport(
        model=trained.model,
        output=str(request.output),
        num_rows=len(search.samples),
        shape=shape,
        tried=tried,
        max_difference=found,
        before=before,
        after=after,
    )


class _Search:
    """Which layers and neurons are kept.

    Args:
        model: the whole one.
        samples: rows that neurons are measured on.
        few: rows that layers and shapes are tried on.
    """

    def __init__(self, model: Any, trained: TrainedModel, samples: Samples, few: Samples) -> None:
        self.samples, self.few = samples, few
        self._model, self._trained = model, trained
        self._fields, self._parts = find_feed_forwards(model)
        self._layers = encoder_layers(model)
        tell("measuring neurons")
        self._importance = measure_importance(model, self._parts, samples, BATCH_ROWS)
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
        wanted = list(self._wanted(target))
        tried = []
        for num_layers, num_neurons in wanted:
            tell(f"trying {num_layers} layers of {num_neurons} neurons")
            removed = set(self._removed(len(self._layers) - num_layers))
            kept = tuple(place for place in range(len(self._layers)) if place not in removed)
            change = self._change(num_neurons, removed)
            tried.append(Shape(layers=kept, neurons=num_neurons, change=change))
        return min(tried, key=lambda shape: shape.change), tuple(tried)

    def masked_answers(self, shape: Shape) -> list[Answers]:
        """What the whole model answers as if it had this shape."""
        removed = set(range(len(self._layers))) - set(shape.layers)
        with masked(self._model, self._parts, self._kept(shape.neurons), removed):
            return list(answers(self._model, self.few, BATCH_ROWS))

    def cut(self, shape: Shape) -> None:
        """Give the model this shape for good."""
        for part, kept in zip(self._parts, self._kept(shape.neurons), strict=True):
            part.keep(kept)
        for name in self._fields:
            setattr(self._model.config, name, shape.neurons)
        if len(shape.layers) < len(self._layers):
            keep_layers(self._model, shape.layers)

    def _wanted(self, target: PruneTarget) -> Iterator[tuple[int, int]]:
        """Layers and neurons of every shape that is small enough and no smaller."""
        num_layers, num_neurons = len(self._layers), self._first.num_neurons
        if target.layers is not None and num_layers < num_layer_applications(self._model):
            raise WorkloadError(["layers of this model share their weights: none can be taken out"])
        for name, asked, most in (("layers", target.layers, num_layers), ("neurons", target.neurons, num_neurons)):
            if asked is not None and not 1 <= asked <= most:
                raise WorkloadError([f"{name} {asked}: the model has {most} {name}, and keeps 1 to {most}"])
        counts = [target.layers] if target.layers is not None else self._possible_layers()
        budget = self._budget(target)
        if budget is None:
            yield target.layers or num_layers, target.neurons or num_neurons
            return
        found = [(count, n) for count in counts if (n := target.neurons or self._neurons(count, budget))]
        found = [(count, n) for count, n in found if self._num_parameters(count, n) <= budget]
        if target.memory_bytes is not None:
            found = [shape for shape in found if self._predicted(*shape) <= target.memory_bytes]
        if not found:
            least = self._num_parameters(min(counts), self._least_neurons)
            raise WorkloadError(
                [f"the layers cannot be pruned to {budget:,} parameters: the fewest that are tried are {least:,}"],
                hint="ask for more, or distil a smaller model: vramfit distill",
            )
        if (num_layers, num_neurons) in found:
            raise WorkloadError(["the model is as small as that already: nothing is pruned"])
        yield from found

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
            return self._fitting(target.memory_bytes, whole)
        return None

    def _fitting(self, memory_bytes: int, whole: int) -> int:
        """Parameters of layers with which serving is predicted to fit."""
        all_layers = len(self._layers)
        for twentieths in range(20, 0, -1):
            budget = whole * twentieths // 20
            num_neurons = self._neurons(all_layers, budget)
            if not num_neurons:
                break
            if self._predicted(all_layers, num_neurons) <= memory_bytes:
                return budget
        least = format_bytes(self._predicted(all_layers, self._least_neurons))
        asked = format_bytes(memory_bytes)
        raise WorkloadError(
            [f"with the fewest neurons that are tried, serving takes {least}, more than {asked}"],
            hint="take fewer layers (--layers), or trim the vocabulary: vramfit trim",
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
        return range(most if is_shared else 1 + self._must_stay, most + 1)

    @property
    def _must_stay(self) -> bool:
        """Whether the first layer is made otherwise than the others, so that none can take its place."""
        names = [tuple(name for name, _ in layer.named_parameters()) for layer in self._layers[:2]]
        return len(set(names)) > 1

    @property
    def _least_neurons(self) -> int:
        least = int(LEAST_SHARE * self._first.num_neurons)
        return max(least - least % STEP, min(STEP, self._first.num_neurons))

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
        places = range(int(self._must_stay), len(self._layers))
        while len(self._order) < count:
            tell(f"choosing layer {len(self._order) + 1} of {count} to remove")
            left = [place for place in places if place not in self._order]
            changes = {place: self._change(self._first.num_neurons, {*self._order, place}) for place in left}
            self._order.append(min(left, key=lambda place: changes[place]))
        return self._order[:count]

    def _change(self, num_neurons: int, removed: set[int]) -> float:
        changed, whole = 0.0, 0.0
        with masked(self._model, self._parts, self._kept(num_neurons), removed):
            for a, b in zip(self._answers, answers(self._model, self.few, BATCH_ROWS), strict=True):
                changed += sum(float((a[name] - b[name]).square().sum()) for name in a)
                whole += sum(float(value.square().sum()) for value in a.values())
        return changed / whole

    def _kept(self, num_neurons: int) -> list[torch.Tensor]:
        return best_neurons(self._importance, num_neurons)
