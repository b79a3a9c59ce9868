"""Fusing: the layers of BERT and its kin as one function each (`layer`), for packed passes under autocast."""

import warnings
from functools import cache
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import encoder_layers
from vramfit.techniques import compiling
from vramfit.techniques.fusing.layer import FusedLayer, LayerShape
from vramfit.techniques.packing.attention import is_new_enough, takes_heads
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
PLAIN = (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Dropout, torch.nn.GELU)
GATHERS = "output_capturing_hook"
"""The name of transformers' own hook."""


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
    reason = None
    if device.type == "cuda":
        old = None if is_new_enough(device) else "this GPU has no flash kernel for packed rows"
        reason = old or compiling.why_no_triton(device)
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
        shows = kwargs.get("past_key_values") is not None or kwargs.get("output_attentions")
        if is_packed and not shows and _learns(hidden_states) and why_not(hidden_states.device) is None:
            read = self._parts.read()
            if read is not None:
                hidden_states = hidden_states.float()  # ELECTRA's first are a product's, in 16 bits
                return FusedLayer.apply(hidden_states, ends, longest, *read)  # type: ignore[no-untyped-call]
        return type(self._layer).forward(self._layer, hidden_states, attention_mask, *args, **kwargs)


def _learns(hidden_states: torch.Tensor) -> bool:
    """Whether a pass goes through autograd and autocast."""
    device = hidden_states.device.type
    return torch.is_grad_enabled() and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


class _Parts:
    """A layer's parts as they were found. For every pass they are looked at anew, since they may change."""

    def __init__(
        self, layer: Any, linears: list[Any], norms: list[Any], dropouts: list[Any], num_heads: int, scale: float
    ) -> None:
        self._linears, self._norms, self._dropouts = linears, norms, dropouts
        """As `FusedLayer` takes them; dropouts of attention, of its product, and of the second of the feed-forward
        part, None where there is none."""
        self._links = [(parent, name, child) for parent in layer.modules() for name, child in parent._modules.items()]
        self._types = [type(child) for _, _, child in self._links]
        self._num_heads, self._scale = num_heads, scale

    def read(self) -> tuple[Any, ...] | None:
        """The layer's shape and parameters as they are now; None where a part is not what transformers made of it: an
        adapter, quantized, hooked, replaced, or with weights that are not in fp32."""
        for (parent, name, child), kind in zip(self._links, self._types, strict=True):
            if parent.__dict__["_modules"].get(name) is not child or type(child) is not kind or _is_changed(child):
                return None
        parameters = []
        for module in (*self._linears, *self._norms):
            for p in map(module.__dict__["_parameters"].get, ("weight", "bias")):
                if type(p) is not torch.nn.Parameter or p.dtype is not torch.float32:
                    return None
                parameters.append(p)
        attention, after, last = map(_share, self._dropouts)
        first, second = self._norms
        return LayerShape(self._num_heads, self._scale, attention, (after, last), (first.eps, second.eps)), *parameters


def _parts(layer: Any) -> _Parts | None:
    """A layer's parts; None for a layer of another kind."""
    if f"{type(layer).__module__}.{type(layer).__qualname__}" not in LAYERS:
        return None
    places = {type(layer).__module__, "transformers.activations"}
    if not all(type(m) in PLAIN or type(m).__module__ in places for m in layer.modules()):
        return None
    if hasattr(layer, "sa_layer_norm"):  # DistilBERT's
        a, f = layer.attention, layer.ffn
        linears, norms = [a.q_lin, a.k_lin, a.v_lin, a.out_lin, f.lin1, f.lin2], [layer.sa_layer_norm]
        norms, dropouts = [*norms, layer.output_layer_norm], [a.dropout, None, f.dropout]
        num_heads, chunks, activation = a.n_heads, f.chunk_size_feed_forward, f.activation
    else:
        a, first, second = layer.attention.self, layer.attention.output, layer.output
        linears = [a.query, a.key, a.value, first.dense, layer.intermediate.dense, second.dense]
        norms, dropouts = [first.LayerNorm, second.LayerNorm], [a.dropout, first.dropout, second.dropout]
        num_heads, chunks = a.num_attention_heads, layer.chunk_size_feed_forward or layer.is_decoder
        activation = layer.intermediate.intermediate_act_fn
    kinds = [(linears, torch.nn.Linear), (norms, torch.nn.LayerNorm), (dropouts, torch.nn.Dropout)]
    are_plain = all(type(m) is kind for modules, kind in kinds for m in modules if m is not None)
    if chunks or not are_plain or not _is_gelu(activation) or not takes_heads(a.config):
        return None
    if linears[0].in_features != linears[0].out_features:
        return None
    return _Parts(layer, linears, norms, dropouts, num_heads, a.scaling)


def _is_changed(module: torch.nn.Module) -> bool:
    """Whether a module does more than its class says: another forward, or hooks that are not transformers' own, which
    gather outputs where a call asks for them."""
    d = module.__dict__
    if "forward" in d or d["_forward_pre_hooks"] or d["_backward_hooks"] or d["_backward_pre_hooks"]:
        return True
    return any(getattr(hook, "__name__", "") != GATHERS for hook in d["_forward_hooks"].values())


def _is_gelu(activation: Any) -> bool:
    """Whether an activation is GELU itself, without approximation."""
    exact = type(activation).__name__ == "GELUActivation" and activation.act is torch.nn.functional.gelu
    return exact or (type(activation) is torch.nn.GELU and activation.approximate == "none")


def _share(dropout: Any) -> float:
    """What a dropout drops now."""
    return float(dropout.p) if dropout is not None and dropout.training else 0.0
