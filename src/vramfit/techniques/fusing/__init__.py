"""Fusing: the layers of a model as one function each (`layer`), for packed passes that learn, and for others.

What a layer is, is read off its modules (`description`); on a device, every kind of layer is tried beside its own code
before it is fused (`trial`).
"""

import warnings
from functools import cache
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.models.anatomy import encoder_layers
from vramfit.techniques import compiling
from vramfit.techniques.fusing import trial
from vramfit.techniques.fusing.description import Description, NotDescribed
from vramfit.techniques.fusing.layer import FusedLayer, compute
from vramfit.techniques.fusing.pieces import PackedRow
from vramfit.techniques.fusing.trial import Types
from vramfit.techniques.packing.attention import FLASH_TYPES, is_new_enough

__all__ = ["Description", "Types"]


def apply(model: torch.nn.Module) -> None:
    """Let every layer that can be fused run so where it is given packed rows, in place: under autocast, or with weights
    in 16 bits where nothing learns. Others, and all other calls, run as before."""
    for layer in encoder_layers(model):
        description = describe(layer)
        if isinstance(description, str) or "forward" in layer.__dict__ or description.read() is None:
            continue
        if trial.why_not(layer, description) is None:
            layer.forward = FusedForward(layer, description)


def require(model: torch.nn.Module) -> None:
    """As `apply`, for a job that asks for it.

    Raises:
        WorkloadError: no layer of the model can be fused.
    """
    apply(model)
    found = [describe(layer) for layer in encoder_layers(model)]
    if not is_applied(model) and not any(isinstance(d, Description) and d.read() for d in found):
        reason = next((f"they have {why}" for why in found if isinstance(why, str)), "they were changed")
        raise WorkloadError(
            [f"fused: the layers of {type(model).__name__} cannot be fused: {reason}"],
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
    found = [describe(layer) for layer in encoder_layers(model)]
    return bool(found) and all(isinstance(d, Description) and d.read() is not None for d in found)


def was_measured(model: torch.nn.Module) -> bool:
    """Whether every layer of a model can be fused, and is of the kind that was measured on a GPU: BERT's."""
    found = [describe(layer) for layer in encoder_layers(model)]
    return bool(found) and all(isinstance(d, Description) and d.is_berts for d in found)


def describe(layer: torch.nn.Module) -> Description | str:
    """A layer's description; what it has that none has, where it cannot be fused."""
    try:
        return Description(layer)
    except NotDescribed as error:
        return str(error)


def why_not_here(model: torch.nn.Module, device: torch.device, types: Types) -> str | None:
    """Why the layers of a model cannot be fused on a device, as tried there with random weights, which is said once;
    None where they can."""
    if device.type != "cuda":
        return None
    reason = why_not(device)
    for layer in encoder_layers(model) if reason is None else ():
        description = describe(layer)
        if isinstance(description, Description):
            reason = reason or trial.why_no_kernels(layer, description, device, types)
    return reason


def for_plan(
    model: torch.nn.Module, device: torch.device, *, dtype: torch.dtype = torch.bfloat16, asked: bool | None = None
) -> dict[str, bool]:
    """Keywords for a plan that is to run on a device: not to count on fused layers, where it does not have them.

    Args:
        dtype: of the products.
        asked: whether layers are to be fused; None where their kind was measured.
    """
    is_wanted = asked is not False and (can_be(model) if asked else was_measured(model))
    cannot = is_wanted and why_not_here(model, device, Types(torch.float32, dtype)) is not None
    return {"fused": False} if cannot else {}


def try_out(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Try the layers of a model that learns under autocast before its first step: no part of that step's memory."""
    if why_not(device) is None:
        for layer in encoder_layers(model):
            if isinstance(fused := layer.__dict__.get("forward"), FusedForward):
                fused.why_not(device, Types(torch.float32, dtype))


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

    def __init__(self, layer: torch.nn.Module, description: Description) -> None:
        self._layer, self._description = layer, description
        self._reasons: dict[Any, str | None] = {}
        """Why not, by device and types that were tried."""

    def __call__(self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if attention_mask is None and _is_row(kwargs) and why_not(hidden_states.device) is None:
            made = self._fused(hidden_states, kwargs)
            if made is not None:
                return made
        return type(self._layer).forward(self._layer, hidden_states, attention_mask, *args, **kwargs)

    def _fused(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The layer's output; None where its own code is to make it."""
        types = _types(hidden)
        read = None if types is None else self._description.read()
        if types is None or read is None or read[2] is not types.weights:
            return None
        shape, parameters, _ = read
        cos, sin = (kwargs.get("position_embeddings") if shape.is_turned else None) or (None, None)
        fits = not shape.is_turned or (cos is not None and cos.shape == (*hidden.shape[:-1], shape.head_size))
        if not fits or self.why_not(hidden.device, types) is not None:
            return None
        hidden = hidden.float() if types.weights is torch.float32 else hidden  # ELECTRA's first are in 16 bits
        row = PackedRow(hidden, kwargs["cu_seq_lens_q"], kwargs["max_length_q"], cos, sin)
        if torch.is_grad_enabled():
            return FusedLayer.apply(*row, shape, types.products, *parameters)  # type: ignore[no-any-return,no-untyped-call]
        return compute(row, shape, types.products, parameters, keeps=False)[0]

    def why_not(self, device: torch.device, types: Types) -> str | None:
        """Why the layer's kernels cannot be run on a device; None where they can, and where there are none."""
        if device.type != "cuda":
            return None
        key = device, types
        if key not in self._reasons:
            self._reasons[key] = trial.why_no_kernels(self._layer, self._description, device, types)
        return self._reasons[key]


def _is_row(kwargs: dict[str, Any]) -> bool:
    """Whether a call gives a packed row, and asks for nothing but what becomes of it."""
    is_packed = kwargs.get("cu_seq_lens_q") is not None and kwargs.get("max_length_q") is not None
    others = (kwargs.get(name) for name in ("past_key_values", "is_causal"))
    return is_packed and not kwargs.get("output_attentions") and all(given is None for given in others)


def _types(hidden: torch.Tensor) -> Types | None:
    """Of the weights and products that a pass has to have here; None where it is none to be fused."""
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return Types(torch.float32, torch.get_autocast_dtype(device))
    if torch.is_grad_enabled() or hidden.dtype not in FLASH_TYPES:
        return None
    return Types(hidden.dtype, hidden.dtype)
