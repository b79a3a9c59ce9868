"""The parts of layers, asked of their modules: which neurons and heads matter, and a layer with fewer of them.

A configuration of transformers says one intermediate size for all layers, so every layer keeps as many neurons.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import encoder_layers
from vramfit.smaller.rows import outputs_of
from vramfit.tasks.parts.losses import model_inputs

NUM_ROWS = 256
"""Rows that importance is measured on, where nothing else is asked for."""
BATCH_ROWS = 16
STEP = 8
"""Neurons of a layer are a multiple of this, which kernels like."""
SIZE_FIELDS = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff")
"""Fields of configurations that say how many neurons a layer has."""
ATTENTION = "att"
"""Part of the name of every attention module; what is inside is no feed-forward part."""
WHY_NO_HEADS = (
    "The configuration has no size of a head of its own, or its query heads share keys, so that it cannot say fewer "
    "heads of the same size."
)


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """One layer's: what leads to the neurons, and what leads away; or to attention's heads, end to end, and away."""

    ups: tuple[torch.nn.Linear, ...]
    """One, or two where one of them is a gate; a single one may hold both, end to end."""
    down: torch.nn.Linear

    @property
    def num_neurons(self) -> int:
        """Inputs of what leads away."""
        return self.down.in_features

    @property
    def parameters_of_neuron(self) -> int:
        """Parameters that go with one neuron."""
        per_row = sum((up.in_features + (up.bias is not None)) * self._parts(up) for up in self.ups)
        return per_row + self.down.out_features

    def keep(self, neurons: torch.Tensor) -> None:
        """Take all other neurons out, in place."""
        for up in self.ups:
            rows = torch.cat([neurons + part * self.num_neurons for part in range(self._parts(up))])
            up.weight = torch.nn.Parameter(up.weight.detach()[rows].clone())
            if up.bias is not None:
                up.bias = torch.nn.Parameter(up.bias.detach()[rows].clone())
            up.out_features = len(rows)
        self.down.weight = torch.nn.Parameter(self.down.weight.detach()[:, neurons].clone())
        self.down.in_features = len(neurons)

    def _parts(self, up: torch.nn.Linear) -> int:
        return up.out_features // self.num_neurons


def find_feed_forwards(model: Any) -> tuple[tuple[str, ...], list[FeedForward]]:
    """The fields of the configuration that say how many neurons there are, and the feed-forward part of each layer.

    Raises:
        WorkloadError: a family whose layers have none that is recognised; names it.
    """
    config = model.config
    sizes = {name: getattr(config, name, None) for name in SIZE_FIELDS}
    size = next((value for value in sizes.values() if isinstance(value, int)), None)
    if size is None:
        raise _refused(model, f"the configuration has none of {', '.join(SIZE_FIELDS)}")
    found: list[FeedForward] = []
    for layer in encoder_layers(model):
        linears = [
            module
            for name, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear) and ATTENTION not in name.lower()
        ]
        downs = [linear for linear in linears if linear.in_features == size]
        ups = [linear for linear in linears if linear.out_features in (size, 2 * size) and linear not in downs]
        known = {id(p) for linear in (*ups, *downs) for p in linear.parameters()}
        others = [
            name
            for name, p in layer.named_parameters()
            if id(p) not in known and size in p.shape and ATTENTION not in name.lower()
        ]
        if len(downs) != 1 or not 1 <= len(ups) <= 2 or others or size == downs[0].out_features:
            raise _refused(model, f"layer {len(found)} has no feed-forward part of {size} neurons that is recognised")
        found.append(FeedForward(tuple(ups), downs[0]))
    if not found:
        raise _refused(model, "no layers are recognised")
    return tuple(name for name in sizes if sizes[name] == size), found


def find_attentions(model: Any) -> list[FeedForward]:
    """What leads to the heads of each layer, and what leads away: the last linear layer of attention.

    Raises:
        WorkloadError: a family whose layers have none that is recognised; names it.
    """
    found: list[FeedForward] = []
    for layer in encoder_layers(model):
        linears = [
            module
            for name, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear) and ATTENTION in name.lower()
        ]
        if len(linears) < 2:
            raise _refused(model, f"layer {len(found)} has no attention that is recognised")
        found.append(FeedForward(tuple(linears[:-1]), linears[-1]))
    return found


def has_own_head_size(config: Any) -> bool:
    """Whether a configuration can say fewer heads of the same size."""
    num_heads = getattr(config, "num_attention_heads", None)
    return isinstance(vars(config).get("head_dim"), int) and getattr(config, "num_key_value_heads", None) in (
        None,
        num_heads,
    )


def set_heads(config: Any, num_heads: int) -> None:
    """Have a configuration say so many heads, of queries, keys and values alike."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config, name, None) is not None:
            setattr(config, name, num_heads)


def can_have_heads(config: Any, num_heads: int) -> bool:
    """Whether transformers takes a configuration with so many heads: some want them to divide the hidden size."""
    wanted = copy.deepcopy(config)
    set_heads(wanted, num_heads)
    try:
        wanted.validate()
    except StrictDataclassClassValidationError:
        return False
    return True


def inputs_of_heads(heads: torch.Tensor, head_size: int) -> torch.Tensor:
    """The numbers of heads, which lie in a row, by number of the head."""
    return (heads[:, None] * head_size + torch.arange(head_size)).flatten()


def best_heads(importance: Sequence[torch.Tensor], num_heads: int, count: int) -> list[torch.Tensor]:
    """The most important heads of each layer, by the importance of their numbers."""
    return best_neurons([one.reshape(num_heads, -1).sum(1) for one in importance], count)


def _refused(model: Any, why: str) -> WorkloadError:
    family = getattr(model.config, "model_type", "") or type(model).__name__
    return WorkloadError(
        [f"{family} models cannot be pruned: {why}"],
        hint="distil it into a smaller model that you name: vramfit distill … --student MODEL",
    )


def measure_importance(model: Any, parts: Sequence[FeedForward], samples: Any, batch: int) -> list[torch.Tensor]:
    """How much the answers change, to first order, where a neuron is taken out: a number for each, layer by layer.

    The change of the answers is the activation times the gradient (Molchanov et al. 2017). Labels are not needed: the
    gradient is that of a random combination of all outputs, whose square is on average the sum of the squares of all.
    """
    found = [torch.zeros(part.num_neurons, dtype=torch.float64) for part in parts]
    draw = torch.Generator().manual_seed(0)
    seen: dict[int, torch.Tensor] = {}

    def see(place: int, args: tuple[Any, ...]) -> None:
        seen[place] = args[0]
        args[0].retain_grad()

    model.requires_grad_(True)
    with ExitStack() as stack:
        for place, part in enumerate(parts):
            hook = part.down.register_forward_pre_hook(lambda module, args, place=place: see(place, args))
            stack.callback(hook.remove)
        for begin in range(0, len(samples), batch):
            made = samples.collate(range(begin, min(begin + batch, len(samples))))
            outputs = outputs_of(model(**model_inputs(made)), made)
            drawn = [(value * torch.randn(value.shape, generator=draw)).sum() for value in outputs.values()]
            torch.autograd.backward(torch.stack(drawn).sum())
            for place, activation in seen.items():
                assert activation.grad is not None
                change = (activation * activation.grad).detach().double()
                by_row = change.sum(1) if change.dim() == 3 else change.sum(0, keepdim=True)
                found[place] += by_row.square().sum(0)
            seen.clear()
            model.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    return found


def best_neurons(importance: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The most important neurons of each layer, in their order."""
    return [one.topk(count).indices.sort().values for one in importance]


@contextmanager
def masked(
    model: Any, parts: Sequence[FeedForward], neurons: Sequence[torch.Tensor], removed: set[int]
) -> Iterator[None]:
    """Inside, a model answers as if it had only these neurons of each layer, and not the layers that are removed."""
    layers = encoder_layers(model)
    with ExitStack() as stack:
        for part, kept in zip(parts, neurons, strict=True):
            mask = torch.zeros(part.num_neurons)
            mask[kept] = 1.0
            hook = part.down.register_forward_pre_hook(lambda module, args, mask=mask: (args[0] * mask, *args[1:]))
            stack.callback(hook.remove)
        for place in removed:
            stack.callback(layers[place].register_forward_hook(_pass_on, with_kwargs=True).remove)
        yield


def _pass_on(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """What went into a layer, in the place of what came out."""
    given = args[0] if args else kwargs["hidden_states"]
    return (given, *output[1:]) if isinstance(output, tuple) else given
