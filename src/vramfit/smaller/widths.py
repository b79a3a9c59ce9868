"""Models of a smaller hidden size made of a trained one: the dimensions, heads and neurons that matter most."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.runtime.data.samples import Samples
from vramfit.smaller.neurons import (
    BATCH_ROWS,
    STEP,
    best_heads,
    best_neurons,
    find_attentions,
    find_feed_forwards,
    inputs_of_heads,
    measure_importance,
    set_heads,
)
from vramfit.smaller.rows import answers, difference
from vramfit.stages import tell

HIDDEN_FIELDS = ("hidden_size", "dim", "d_model", "embedding_size", "pooler_hidden_size")
"""Fields of configurations that may say the hidden size; those that hold another number mean something else."""
MAX_DIFFERENCE = 1e-4
"""Between the answers of a model and of the same model with its dimensions, heads and neurons in another order."""
GIVE_STUDENT = "give a student: --student MODEL"


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What stays of a model, by number."""

    dims: torch.Tensor
    """Of the vector that every token has between layers."""
    heads: Sequence[torch.Tensor]
    """Of each layer."""
    neurons: Sequence[torch.Tensor]
    """Of each layer."""


@dataclass(frozen=True, slots=True)
class Place:
    """One dimension of one parameter that gets smaller with the hidden size."""

    name: str
    dim: int
    layer: int | None = None
    """Whose heads it holds, end to end; None where it holds dimensions between layers."""
    is_per_head: bool = False
    """Whether it has one number for each head, in all layers."""


def check_width(config: Any, hidden_size: int) -> None:
    """Refuse a hidden size that is not a whole number of the teacher's heads.

    Raises:
        WorkloadError: with the nearest sizes that are.
    """
    size, num_heads = int(config.hidden_size), int(config.num_attention_heads)
    head = getattr(config, "head_dim", None) or size // num_heads
    if getattr(config, "num_key_value_heads", None) not in (None, num_heads) or head * num_heads != size:
        raise WorkloadError([f"heads of {config.model_type} models do not divide their hidden size"], hint=GIVE_STUDENT)
    if hidden_size % head or not head <= hidden_size <= size:
        below = min(max(hidden_size // head * head, head), size)
        nearest = " or ".join(f"{n:,}" for n in sorted({below, min(below + head, size)}))
        raise WorkloadError(
            [f"hidden_size {hidden_size:,}: the teacher has {num_heads} heads of {head}, {size:,} together"],
            hint=f"the nearest sizes that are whole heads: {nearest}",
        )


def narrow(model: Any, hidden_size: int, samples: Samples) -> Any:
    """Take all but the most important dimensions, heads and neurons out of a model, in place; gives its configuration.

    Raises:
        WorkloadError: a family that is not understood, with the reason.
    """
    return _Narrowing(model, hidden_size).take(samples)


class _Narrowing:
    """One model on its way to a smaller hidden size."""

    def __init__(self, model: Any, hidden_size: int) -> None:
        config = model.config
        self._model, self._size = model, int(config.hidden_size)
        self._num_heads = int(config.num_attention_heads)
        self._head_size = self._size // self._num_heads
        self._num_kept = hidden_size // self._head_size
        self._fields, self._parts = find_feed_forwards(model)
        self._wanted = self._configuration()
        self._attentions = find_attentions(model)
        self._places = list(self._find_places(self._inner()))

    def take(self, samples: Samples) -> Any:
        """Measure, choose and take out; gives the configuration of what is left."""
        self._check_order(samples)
        tell("measuring dimensions, heads and neurons")
        kept = self._choose(samples)
        _reduce(self._model, self._places, kept, self._head_size)
        for name in self._fields:
            setattr(self._wanted, name, len(kept.neurons[0]))
        return self._wanted

    def _configuration(self) -> Any:
        """With fewer heads and the smaller hidden size; neurons are as many as before."""
        wanted = copy.deepcopy(self._model.config)
        for name in HIDDEN_FIELDS:
            if vars(wanted).get(name) == self._size:
                setattr(wanted, name, self._num_kept * self._head_size)
        set_heads(wanted, self._num_kept)
        return wanted

    def _inner(self) -> dict[tuple[str, int], int]:
        """Which dimensions of parameters hold heads, and of which layer."""
        names = {id(module): name for name, module in self._model.named_modules()}
        inner: dict[tuple[str, int], int] = {}
        for layer, part in enumerate(self._attentions):
            inner[f"{names[id(part.down)]}.weight", 1] = layer
            inner |= {(f"{names[id(up)]}.{kind}", 0): layer for up in part.ups for kind in ("weight", "bias")}
        return inner

    def _find_places(self, inner: dict[tuple[str, int], int]) -> Iterator[Place]:
        """What gets smaller: asked of a model with the smaller configuration."""
        with torch.device("meta"):
            expected = dict(type(self._model)(self._wanted).named_parameters())
        found = dict(self._model.named_parameters())
        if expected.keys() != found.keys():
            raise self._refused(f"{min(expected.keys() ^ found.keys())} would come or go")
        for name, parameter in found.items():
            for dim, (old, new) in enumerate(zip(parameter.shape, expected[name].shape, strict=True)):
                if old == new:
                    continue
                is_per_head = (old, new) == (self._num_heads, self._num_kept)
                if not is_per_head and old % self._size:
                    raise self._refused(f"{name} has {old} numbers, and would have {new}")
                yield Place(name, dim, inner.get((name, dim)), is_per_head)

    def _check_order(self, samples: Samples) -> None:
        """Answers do not depend on the order of dimensions, heads and neurons, where all of them are understood."""
        draw = torch.Generator().manual_seed(0)
        heads = torch.arange(self._num_heads).flip(0)  # in all layers, as some parameters have it for all
        neurons = [torch.randperm(part.num_neurons, generator=draw) for part in self._parts]
        shuffled = Kept(torch.randperm(self._size, generator=draw), [heads] * len(self._parts), neurons)
        other = copy.deepcopy(self._model)
        _reduce(other, self._places, shuffled, self._head_size)
        few = range(min(len(samples), BATCH_ROWS))
        pairs = (next(answers(one, samples, len(few))) for one in (self._model, other))
        found = difference(*pairs)
        if not found <= MAX_DIFFERENCE:
            raise self._refused(
                f"with dimensions and heads in another order its answers change by {found:.2g}, so not all of its "
                "parameters are understood"
            )

    def _choose(self, samples: Samples) -> Kept:
        """The dimensions with the largest mean activation after norms; heads and neurons as answers depend on them."""
        parts = [*self._parts, *self._attentions]
        with _watching(self._model, self._size) as activation:
            importance = measure_importance(self._model, parts, samples, BATCH_ROWS)
        num_layers = len(self._parts)
        in_heads = importance[num_layers:]
        if any(place.is_per_head for place in self._places):
            in_heads = [torch.stack(in_heads).sum(0)] * num_layers
        num_neurons = self._parts[0].num_neurons * self._num_kept // self._num_heads
        num_neurons -= num_neurons % STEP if num_neurons > STEP else 0
        return Kept(
            best_neurons([activation], self._num_kept * self._head_size)[0],
            best_heads(in_heads, self._num_heads, self._num_kept),
            best_neurons(importance[:num_layers], num_neurons),
        )

    def _refused(self, why: str) -> WorkloadError:
        family = self._model.config.model_type
        return WorkloadError([f"{family} models cannot have a smaller hidden size: {why}"], hint=GIVE_STUDENT)


def _reduce(model: Any, places: Sequence[Place], kept: Kept, head_size: int) -> None:
    """Keep so much of a model, in that order, in place."""
    for part, neurons in zip(find_feed_forwards(model)[1], kept.neurons, strict=True):
        part.keep(neurons)
    size = int(model.config.hidden_size)
    for place in places:
        parameter = model.get_parameter(place.name)
        if place.is_per_head:
            index = kept.heads[0]
        else:
            heads = None if place.layer is None else kept.heads[place.layer]
            one = kept.dims if heads is None else inputs_of_heads(heads, head_size)
            index = torch.cat([one + begin for begin in range(0, parameter.shape[place.dim], size)])
        parameter.data = parameter.data.index_select(place.dim, index)  # parameters that are shared stay so


@contextmanager
def _watching(model: Any, size: int) -> Iterator[torch.Tensor]:
    """Inside, the absolute outputs of all norms of this size are added up, without those at padding."""
    total = torch.zeros(size, dtype=torch.float64)
    masks: list[torch.Tensor] = []

    def add(output: torch.Tensor) -> None:
        mask = masks[-1]
        seen = output.detach()[mask] if output.shape[:2] == mask.shape else output.detach().flatten(0, -2)
        total.add_(seen.abs().double().sum(0))

    with ExitStack() as stack:
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"].bool()), with_kwargs=True
        )
        stack.callback(hook.remove)
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if weight is not None and "Norm" in type(module).__name__ and weight.shape == (size,):
                stack.callback(module.register_forward_hook(lambda module, args, output: add(output)).remove)
        yield total
