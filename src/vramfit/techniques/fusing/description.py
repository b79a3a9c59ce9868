"""What a layer is, read off its own modules: where its parts are, what they do, and whether they still are as found."""

import inspect
from collections.abc import Hashable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from vramfit.techniques.fusing.operators import GELU, GELU_TANH, SILU
from vramfit.techniques.fusing.pieces import LayerShape
from vramfit.techniques.packing.attention import takes_heads

ATTENTIONS = ("attention.self", "self_attn", "attn", "attention")
HEADS = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q_proj", "k_proj", "v_proj"), ("Wqkv",))
"""Linear layers of an attention part that make queries, keys and values."""
OUT = ("attention.output.dense", "attention.out_lin", "self_attn.o_proj", "attn.Wo")
WIDE = (("intermediate.dense",), ("ffn.lin1",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.Wi",))
NARROW = ("output.dense", "ffn.lin2", "mlp.down_proj", "mlp.Wo")
ACTIVATION = ("intermediate.intermediate_act_fn", "ffn.activation", "mlp.act_fn", "mlp.act")
POST_NORMS = (
    ("attention.output.LayerNorm", "output.LayerNorm"),
    ("sa_layer_norm", "output_layer_norm"),
    ("post_attention_layernorm", "post_mlp_layernorm"),
)
PRE_NORMS = (("input_layernorm", "post_attention_layernorm"), ("attn_norm", "mlp_norm"))
DROPOUTS = (
    ("attention.self.dropout", "attention.dropout"),
    ("attention.output.dropout", "post_attention_dropout", "attn.out_drop"),
    ("output.dropout", "ffn.dropout", "post_mlp_dropout"),
    ("mlp.drop", "mlp.dropout"),
)
"""Of attention's scores, after its product, after the narrow product, and after a gate."""

GATHERS = "output_capturing_hook"
"""The name of transformers' own hook."""


class NotDescribed(Exception):
    """What a layer has that no description has."""


class Description:
    """A layer's parts as they were found. For every pass they are looked at anew, since they may change.

    Raises:
        NotDescribed: a layer of another kind.
    """

    def __init__(self, layer: Any) -> None:
        self._attention = attention = _one_of(layer, ATTENTIONS, "attention")
        heads = _row_of(attention, HEADS)
        wide, out, narrow = _row_of(layer, WIDE), _one_of(layer, OUT, "product"), _one_of(layer, NARROW, "product")
        post, pre = (_row_of(layer, names, missing=[]) for names in (POST_NORMS, PRE_NORMS))
        if bool(post) == bool(pre):
            raise NotDescribed("norms in other places")
        activation = _one_of(layer, ACTIVATION, "activation")
        self._linears, self._norms = [*heads, out, *wide, narrow], post or pre
        self._dropouts = [_one_of(layer, names) for names in DROPOUTS]
        _check_code(layer)
        self._check_parts(layer, activation)
        if any(len({m.bias is None for m in group}) > 1 for group in (heads, wide)):
            raise NotDescribed("biases of some products alone")
        size = next((getattr(attention, n) for n in ("attention_head_size", "head_dim") if hasattr(attention, n)), 0)
        if not size:
            size = out.in_features // attention.n_heads
        if not takes_heads(attention.config) or size % 2:
            raise NotDescribed(f"heads of {size}")
        rows = heads[0].out_features // (3 if len(heads) == 1 else 1)
        others = rows if len(heads) == 1 else heads[1].out_features
        kind: Any = type(attention)
        self._fixed = {
            "head_size": size,
            "num_heads": rows // size,
            "num_others": others // size,
            "scale": float(getattr(attention, "scaling", size**-0.5)),
            "eps": tuple(_eps(norm) for norm in self._norms),
            "act": _act(activation),
            "is_gated": len(wide) > 1 or wide[0].out_features == 2 * narrow.in_features,
            "is_pre": bool(pre),
            "has_first_norm": type(self._norms[0]) is not torch.nn.Identity,
            "rms": type(self._norms[1]) is not torch.nn.LayerNorm,
            "is_turned": "position_embeddings" in _arguments(kind),
            "window": _window(attention),
            "num_linears": (len(heads), len(wide)),
        }
        has_place = True, True, not pre, self._fixed["is_gated"]
        if any(m is not None and not has for m, has in zip(self._dropouts, has_place, strict=True)):
            raise NotDescribed("dropout in another place")
        self._links = [(parent, name, child) for parent in layer.modules() for name, child in parent._modules.items()]
        self._types = [type(child) for _, _, child in self._links]
        self._shapes: dict[tuple[Any, ...], LayerShape] = {}
        self.is_berts = self._shape().is_berts and all(m.bias is not None for m in (*self._linears, *self._norms))
        sizes = (tuple(m.weight.shape) for m in self._linears)
        biases = (getattr(m, "bias", None) is None for m in (*self._linears, *self._norms))
        self.kind = (*_code_of(layer), *sizes, *biases, *self._fixed.items())
        """Equal for layers that do the same."""

    def _check_parts(self, layer: Any, activation: Any) -> None:
        """Every part that computes is one that has a place, and does what its place says."""
        known = {id(m) for m in (*self._linears, *self._norms, *self._dropouts, *activation.modules())}
        for name, module in layer.named_modules():
            if (not module._modules or module._parameters) and id(module) not in known:
                raise NotDescribed(f"{name or 'parameters'} beside the usual parts")
        if any(type(m) is not torch.nn.Linear for m in self._linears):
            raise NotDescribed("products of another class")
        first, second = self._norms
        plain = (type(second) is torch.nn.LayerNorm and second.elementwise_affine) or _is_rms(second)
        if not plain or type(first) not in (type(second), torch.nn.Identity):
            raise NotDescribed(f"norms of class {type(second).__name__}")
        if any(m is not None and type(m) not in (torch.nn.Dropout, torch.nn.Identity) for m in self._dropouts):
            raise NotDescribed("dropout of another class")

    def read(self) -> tuple[LayerShape, list[Any], torch.dtype] | None:
        """The layer's shape, its parameters and their type as they are now; None where a part is not what transformers
        made of it: an adapter, quantized, hooked, replaced, or with weights of several types."""
        for (parent, name, child), kind in zip(self._links, self._types, strict=True):
            if parent.__dict__["_modules"].get(name) is not child or type(child) is not kind or _is_changed(child):
                return None
        parameters: list[Any] = []
        dtype = self._linears[0].__dict__["_parameters"]["weight"].dtype
        for module in (*self._linears, *self._norms):
            for p in map(module.__dict__["_parameters"].get, ("weight", "bias")):
                if p is not None and (type(p) is not torch.nn.Parameter or p.dtype is not dtype):
                    return None
                parameters.append(p)
        if any(p is None for p in parameters[: 2 * len(self._linears) : 2]):
            return None
        return self._shape(), parameters, dtype

    def _shape(self) -> LayerShape:
        """With what is dropped now."""
        attention, dropouts = self._attention, tuple(map(_share, self._dropouts))
        of_scores = getattr(self._dropouts[0], "p", getattr(attention, "attention_dropout", 0.0))
        of_scores = float(of_scores) if attention.training else 0.0  # whatever mode that module itself is in
        causal = bool(getattr(attention, "is_causal", False))
        key = of_scores, *dropouts[1:], causal
        if key not in self._shapes:
            _, after, last, inner = dropouts
            self._shapes[key] = LayerShape(
                attention_dropout=of_scores, dropout=(after, last), inner_dropout=inner, causal=causal, **self._fixed
            )
        return self._shapes[key]


def _one_of(module: Any, names: tuple[str, ...], what: str = "") -> Any:
    """The first of several modules that is there; None where none is, unless there has to be one."""
    for name in names:
        found = module
        for part in name.split("."):
            found = getattr(found, "_modules", {}).get(part)
        if found is not None:
            return found
    if what:
        raise NotDescribed(f"no {what} in the usual places")
    return None


def _row_of(module: Any, rows: tuple[tuple[str, ...], ...], missing: list[Any] | None = None) -> list[Any]:
    """The first row of modules that are all there."""
    for names in rows:
        found = [_one_of(module, (name,)) for name in names]
        if None not in found:
            return found
    if missing is None:
        raise NotDescribed("products in other places")
    return missing


def _check_code(layer: Any) -> None:
    """A layer's modules are of its own file, of transformers' activations and of torch, and do nothing in chunks."""
    places = {type(layer).__module__, "transformers.activations"}
    for kind in map(type, layer.modules()):
        if kind.__module__ not in places and not kind.__module__.startswith("torch.nn."):
            raise NotDescribed(f"a part of another origin, {kind.__name__}")
    if getattr(layer, "is_decoder", False) or any(getattr(m, "chunk_size_feed_forward", 0) for m in layer.modules()):
        raise NotDescribed("a layer that decodes or works in chunks")


def _code_of(layer: Any) -> tuple[Any, ...]:
    """What says, beside weights, what a layer's code does: layers for which it is equal do the same."""
    plain = (bool, int, float, str, type(None))
    return type(layer), *(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, plain) and key not in ("training", "layer_idx", "gradient_checkpointing")
    )


def _is_changed(module: torch.nn.Module) -> bool:
    """Whether a module does more than its class says: another forward, or hooks that are not transformers' own, which
    gather outputs where a call asks for them."""
    d = module.__dict__
    if "forward" in d or d["_forward_pre_hooks"] or d["_backward_hooks"] or d["_backward_pre_hooks"]:
        return True
    return any(getattr(hook, "__name__", "") != GATHERS for hook in d["_forward_hooks"].values())


def _is_rms(norm: Any) -> bool:
    """Whether a norm is by the root of mean squares alone, with a weight around one."""
    names = [name for name, _ in norm.named_parameters()]
    return names == ["weight"] and isinstance(getattr(norm, "variance_epsilon", None), float)


def _eps(norm: Any) -> float:
    found = getattr(norm, "variance_epsilon", None)
    return float(getattr(norm, "eps", 0.0) if found is None else found)


def _act(activation: Any) -> int:
    """Which activation a module is.

    Raises:
        NotDescribed: none that is known.
    """
    own, name = getattr(activation, "act", None), type(activation).__name__
    approximate = activation.approximate if type(activation) is torch.nn.GELU else None
    if (name == "GELUActivation" and own is F.gelu) or approximate == "none":
        return GELU
    is_partial = isinstance(own, partial) and own.func is F.gelu and own.keywords == {"approximate": "tanh"}
    if (name == "GELUTanh" and is_partial) or approximate == "tanh":
        return GELU_TANH
    if name == "SiLUActivation" or type(activation) is torch.nn.SiLU:
        return SILU
    raise NotDescribed(f"activation {name}")


def _share(dropout: Any) -> float:
    """What a dropout drops now."""
    return float(dropout.p) if type(dropout) is torch.nn.Dropout and dropout.training else 0.0


def _window(attention: Any) -> int:
    """How far a token sees on either side, as the packed kernel is told; -1 for everywhere."""
    found, kind = getattr(attention, "sliding_window", None), attention.__class__
    if not hasattr(attention, "sliding_window") and "sliding_window" in _constants(kind):  # as Mistral does
        found = getattr(attention.config, "sliding_window", None)
    return -1 if found is None else int(found) - 1


@cache
def _arguments(kind: Hashable) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)  # type: ignore[attr-defined]


@cache
def _constants(kind: Hashable) -> frozenset[str]:
    code = inspect.unwrap(kind.forward).__code__  # type: ignore[attr-defined]
    return frozenset(c for c in code.co_consts if isinstance(c, str))
