"""Fusing: the layers of BERT and its kin as one function each (`fused_layer`), for packed passes under autocast."""

import warnings
from functools import cache
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import encoder_layers
from vramfit.techniques import compiling
from vramfit.techniques.fused_layer import FusedLayer, LayerShape
from vramfit.workload import Workload

LAYERS = frozenset(
    f"transformers.models.{family}.modeling_{family}.{name}"
    for family, name in (
        ("bert", "BertLayer"),
        ("camembert", "CamembertLayer"),
        ("distilbert", "TransformerBlock"),
        ("electra", "ElectraLayer"),
        ("roberta", "RobertaLayer"),
        ("xlm_roberta", "XLMRobertaLayer"),
    )
)
"""Layers whose forward `FusedLayer` computes: attention, product, dropout, residual, LayerNorm, and the same again with
GELU between two products. A test holds each beside the original."""
PLAIN = (torch.nn.Linear, torch.nn.LayerNorm)


def is_for(workload: Workload) -> bool:
    """Whether a workload's layers are fused."""
    return workload.fused and workload.trains


def apply(model: torch.nn.Module) -> None:
    """Let every layer that can be fused run so where it learns from packed rows under autocast, in place; others, and
    all other calls, run as before."""
    for layer in encoder_layers(model):
        parts = _parts(layer)
        if parts is not None and parts.read() is not None and "forward" not in layer.__dict__:
            layer.forward = FusedForward(layer, parts)


def require(model: torch.nn.Module) -> None:
    """As `apply`, for a job that asks for it.

    Raises:
        WorkloadError: no layer of the model can be fused.
    """
    apply(model)
    if not is_applied(model):
        raise WorkloadError(
            [f"fused: {type(model).__name__} has no layers of BERT's kind with GELU, or they were changed"],
            hint="leave out fused: layers then run as they are",
        )


def undo(model: torch.nn.Module) -> None:
    """Let the layers run as they were."""
    for layer in encoder_layers(model):
        if _is_fused(layer):
            del layer.forward


def is_applied(model: torch.nn.Module) -> bool:
    """Whether layers of a model are fused where they can be."""
    return any(map(_is_fused, encoder_layers(model)))


def can_be(model: torch.nn.Module) -> bool:
    """Whether every layer of a model can be fused."""
    found = [_parts(layer) for layer in encoder_layers(model)]
    return bool(found) and all(parts is not None and parts.read() is not None for parts in found)


@cache
def why_not(device: torch.device) -> str | None:
    """Why a device has not these kernels, which is said once; None where it has, or needs none."""
    reason = compiling.why_no_triton(device) if device.type == "cuda" else None
    if reason is not None:
        warnings.warn(f"layers are not fused: {reason}", stacklevel=3)
    return reason


def _is_fused(layer: torch.nn.Module) -> bool:
    return isinstance(layer.__dict__.get("forward"), FusedForward)


class FusedForward:
    """What a layer's forward is: fused where that is what a call asks for."""

    def __init__(self, layer: torch.nn.Module, parts: "_Parts") -> None:
        self._layer, self._parts = layer, parts

    def __call__(self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        ends, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
        is_packed = ends is not None and longest is not None and attention_mask is None
        learns = torch.is_grad_enabled() and torch.is_autocast_enabled(hidden_states.device.type)
        shows = kwargs.get("past_key_values") is not None or kwargs.get("output_attentions")
        is_asked = is_packed and learns and not shows and hidden_states.is_floating_point()
        if is_asked and why_not(hidden_states.device) is None:
            read = self._parts.read()
            if read is not None:
                hidden_states = hidden_states.float()  # ELECTRA's first are a product's, in 16 bits
                return FusedLayer.apply(hidden_states, ends, longest, *read)  # type: ignore[no-untyped-call]
        return type(self._layer).forward(self._layer, hidden_states, attention_mask, *args, **kwargs)


class _Parts:
    """Where a layer's parts are; what they are is read anew for every pass, since they may change."""

    def __init__(
        self, modules: list[tuple[Any, str]], dropouts: list[tuple[Any, str] | None], num_heads: int, scale: float
    ) -> None:
        self._modules = modules
        """The six linear layers, as `FusedLayer` takes them, and the two LayerNorms: each its parent and its name."""
        self._dropouts = dropouts
        """Of attention, of its product, and of the second of the feed-forward part."""
        self._parents = list({id(parent): parent for parent, _ in modules}.values())
        self._num_heads, self._scale = num_heads, scale

    def read(self) -> tuple[Any, ...] | None:
        """The layer's shape and parameters as they are now; None where a part is not what torch makes of it: an
        adapter, quantized, hooked, or with weights that are not in fp32."""
        if any(_has_hooks(parent) for parent in self._parents):
            return None
        parameters = []
        for parent, name in self._modules:
            module = parent.__dict__["_modules"][name]
            if type(module) not in PLAIN or _has_hooks(module):
                return None
            for p in map(module.__dict__["_parameters"].get, ("weight", "bias")):
                if type(p) is not torch.nn.Parameter or p.dtype is not torch.float32:
                    return None
                parameters.append(p)
        first, second = (parent.__dict__["_modules"][name] for parent, name in self._modules[-2:])
        attention, after, last = map(_share, self._dropouts)
        shape = LayerShape(self._num_heads, self._scale, attention, (after, last), (first.eps, second.eps))
        return shape, *parameters


def _parts(layer: Any) -> _Parts | None:
    """Where a layer's parts are; None for a layer of another kind."""
    if f"{type(layer).__module__}.{type(layer).__qualname__}" not in LAYERS:
        return None
    if hasattr(layer, "sa_layer_norm"):  # DistilBERT's
        a, f = layer.attention, layer.ffn
        linears = [*((a, name) for name in ("q_lin", "k_lin", "v_lin", "out_lin")), (f, "lin1"), (f, "lin2")]
        modules = [*linears, (layer, "sa_layer_norm"), (layer, "output_layer_norm")]
        is_usual = not f.chunk_size_feed_forward and _is_gelu(f.activation)
        return _Parts(modules, [(a, "dropout"), None, (f, "dropout")], a.n_heads, a.scaling) if is_usual else None
    a, first, second = layer.attention.self, layer.attention.output, layer.output
    linears = [*((a, name) for name in ("query", "key", "value")), (first, "dense")]
    linears += [(layer.intermediate, "dense"), (second, "dense")]
    modules = [*linears, (first, "LayerNorm"), (second, "LayerNorm")]
    is_usual = not layer.chunk_size_feed_forward and _is_gelu(layer.intermediate.intermediate_act_fn)
    if not is_usual or layer.is_decoder or a.all_head_size != a.query.in_features:
        return None
    dropouts: list[tuple[Any, str] | None] = [(a, "dropout"), (first, "dropout"), (second, "dropout")]
    return _Parts(modules, dropouts, a.num_attention_heads, a.scaling)


def _has_hooks(module: torch.nn.Module) -> bool:
    d = module.__dict__
    return bool(d["_forward_hooks"] or d["_forward_pre_hooks"] or d["_backward_hooks"] or d["_backward_pre_hooks"])


def _is_gelu(activation: Any) -> bool:
    """Whether an activation is GELU itself, without approximation."""
    exact = type(activation).__name__ == "GELUActivation" and activation.act is torch.nn.functional.gelu
    return exact or (type(activation) is torch.nn.GELU and activation.approximate == "none")


def _share(place: tuple[Any, str] | None) -> float:
    """What a dropout drops now."""
    if place is None:
        return 0.0
    dropout = place[0].__dict__["_modules"][place[1]]
    return float(dropout.p) if dropout.training else 0.0
