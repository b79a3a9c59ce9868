"""Queries, keys and values of one layer, taken where transformers calls its attention interface; no model code changes.

The attention module of the layer is given a configuration of its own that names another kernel: one that keeps what it
is called with, and calls the kernel that the model has. They leave with the model's output, as `relations`.
"""

import copy
import inspect
import sys
from functools import partial
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import encoder_layers, num_layer_applications
from vramfit.quiet import import_modelling

IMPLEMENTATION = "vramfit_watched"
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What model code of transformers calls its attention interface."""
OWN, SEEN = "_watched_config", "_watched_call"
"""Attributes of an attention module: its own configuration, and what it was called with in the pass that runs."""
HINT = "take distill logits or hidden"


def give_relations(model: Any, layer: int | None = None, *, infers: bool = False) -> None:
    """Have passes of a model give the queries, keys and values of a layer beside what else they give.

    Args:
        layer: counted from 1; None for the last one.
        infers: whether passes without a graph give them too.

    Raises:
        WorkloadError: its attention does not go through transformers' attention interface, or there is no such layer.
    """
    module = _attention_of(model, layer)
    import_modelling()
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _watched)
    module.__dict__[OWN] = module.config
    module.config = copy.copy(module.config)
    module.config._attn_implementation = IMPLEMENTATION

    path = next(name for name, one in model.named_modules() if one is module)
    model.register_forward_pre_hook(partial(_begin, path, infers))
    model.register_forward_hook(partial(_end, path), always_call=True)


def _begin(path: str, infers: bool, model: torch.nn.Module, args: Any) -> None:
    if infers or torch.is_grad_enabled():
        model.get_submodule(path).__dict__[SEEN] = []


def _end(path: str, model: torch.nn.Module, args: Any, output: Any) -> None:
    """Nothing stays with the module, where a pass failed either: it would keep the graph."""
    seen = model.get_submodule(path).__dict__.pop(SEEN, None)
    if seen and output is not None:
        output.relations = tuple(seen)


def width_of_relations(model: Any) -> int:
    """Numbers of a query."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head * config.num_attention_heads)


def _attention_of(model: Any, layer: int | None) -> Any:
    layers, name = encoder_layers(model), type(model).__name__
    if not layers or len(layers) != num_layer_applications(model):
        raise WorkloadError([f"distill relations: layers of {name} share their weights, or are not found"], hint=HINT)
    if layer is not None and layer > len(layers):
        raise WorkloadError([f"distill_relation_layer {layer}: {name} has {len(layers)} layers"])
    chosen = layers[(layer or len(layers)) - 1]
    found = [module for module in chosen.modules() if _calls_interface(module) and hasattr(module, "config")]
    if len(found) != 1:
        raise WorkloadError(
            [
                f"distill relations: {name} computes attention in code of its own, and not through transformers' "
                "attention interface, where queries, keys and values are taken"
            ],
            hint=HINT,
        )
    return found[0]


def _calls_interface(module: torch.nn.Module) -> bool:
    return INTERFACE in inspect.unwrap(type(module).forward).__code__.co_names


def _watched(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **more: Any) -> Any:
    """The model's own attention; what it is called with is kept once a pass: a layer may be computed again."""
    if not query.shape == key.shape == value.shape:
        raise WorkloadError(
            [f"distill relations: {type(module).__name__} has fewer heads of keys and values than of queries"],
            hint=HINT,
        )
    seen = module.__dict__.get(SEEN)
    if seen is not None and not seen:
        seen += [each.transpose(1, 2).flatten(2) for each in (query, key, value)]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    kernel: Any = ALL_ATTENTION_FUNCTIONS.get_interface(module.__dict__[OWN]._attn_implementation, eager)
    return kernel(module, query, key, value, *args, **more)
