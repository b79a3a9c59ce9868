"""Casting: under autocast, the linear weights of a layer are cast by one call, and their gradients come back by one.

Autocast casts every weight and every bias by itself, records each cast, and keeps all of them until its context ends. A
small model waits for the host meanwhile, and a checkpointed one keeps casts that backward makes again. Here a layer
casts all of its own when it is called, and lets go of them when its forward ends; what backward needs, autograd keeps.
Values and gradients are the same to the bit: one gradient in 16 bits for each weight, cast to fp32.
"""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F

from vramfit.models.anatomy import encoder_layers, num_layer_applications


def apply(model: torch.nn.Module) -> None:
    """Let every layer cast its linear weights together, in place; where none can, nothing changes."""
    for layer, linears in [] if is_applied(model) else _found(model):
        casts = LayerCasts(linears)
        layer.register_forward_pre_hook(casts.begin)
        layer.register_forward_hook(casts.end, always_call=True)


def can_be(model: torch.nn.Module) -> bool:
    """Whether a model, not changed yet, has layers that can cast together."""
    return is_applied(model) or bool(_found(model))


def _found(model: torch.nn.Module) -> list[tuple[torch.nn.Module, list[torch.nn.Linear]]]:
    """The layers, each with its linear layers.

    None where a layer is applied more than once (ALBERT): autocast adds up the gradients of one cast in 16 bits, and
    those of several casts would be added up in fp32.
    """
    layers = encoder_layers(model)
    if len({id(layer) for layer in layers}) != num_layer_applications(model):
        return []
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    found = [(x, [m for m in x.modules() if type(m) is torch.nn.Linear and _is_plain(m, owners)]) for x in layers]
    return [(layer, linears) for layer, linears in found if linears]


def undo(model: torch.nn.Module) -> None:
    """Let the layers run as they were."""
    for layer in encoder_layers(model):
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), LayerCasts):
                    del hooks[key]
                    layer._forward_hooks_always_called.pop(key, None)
    for module in model.modules():
        if type(module) is CastLinear:
            module.__class__ = torch.nn.Linear  # type: ignore[assignment]
            module.__dict__.pop("cast", None)


def is_applied(model: torch.nn.Module) -> bool:
    """Whether a model's layers cast together."""
    return any(type(module) is CastLinear for module in model.modules())


def _is_plain(linear: torch.nn.Linear, owners: Counter[int]) -> bool:
    """Whether a linear layer has weights of its own, in fp32: neither quantized nor tied to another's."""
    given = [p for p in linear._parameters.values() if p is not None]
    return _is_known(linear) and all(type(p) is torch.nn.Parameter and owners[id(p)] == 1 for p in given)


def _is_known(linear: torch.nn.Module) -> bool:
    """Whether a linear layer has nothing but plain weights now: pruned and normed ones are made when it is called."""
    given = [p for p in linear._parameters.values() if p is not None]
    plain = all(type(p) in (torch.Tensor, torch.nn.Parameter) and p.dtype is torch.float32 for p in given)
    return plain and linear._parameters.get("weight") is not None and not linear._forward_pre_hooks


class CastLinear(torch.nn.Linear):
    """A linear layer that multiplies by its cast weights where there are some; `weight` and `bias` stay as they are."""

    cast: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.cast is None or torch.compiler.is_compiling() or not torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        weight, bias = self.cast
        return F.linear(input, weight, bias)


class LayerCasts:
    """The linear layers of one layer, which have cast weights while its forward runs."""

    def __init__(self, linears: list[torch.nn.Linear]) -> None:
        for linear in linears:
            linear.__class__ = CastLinear
        self._linears: list[Any] = linears

    def begin(self, layer: torch.nn.Module, inputs: Any) -> None:
        """Cast, where autocast is on and something here learns; else autocast does what it does.

        Of a layer that does not learn nothing may wait for backward: then a cast that ends with its product is less.
        """
        if torch.compiler.is_compiling():
            return
        self._let_go()  # of a forward that Ctrl-C cut short, after which torch calls no hook
        if not torch.is_grad_enabled():
            return
        linears = [linear for linear in self._linears if type(linear) is CastLinear and _is_known(linear)]
        weights: list[Any] = [linear._parameters["weight"] for linear in linears]
        biases = [linear._parameters["bias"] for linear in linears]
        given = [*weights, *(bias for bias in biases if bias is not None)]
        if not any(p.requires_grad for p in given):
            return
        device = given[0].device.type
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return
        made = iter(cast_together(given, torch.get_autocast_dtype(device)))
        casts = [next(made) for _ in weights]
        for linear, weight, bias in zip(linears, casts, biases, strict=True):
            linear.__dict__["cast"] = (weight, None if bias is None else next(made))

    def end(self, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Let go of the casts, also of a forward that failed."""
        if not torch.compiler.is_compiling():
            self._let_go()

    def _let_go(self) -> None:
        for linear in self._linears:
            linear.__dict__.pop("cast", None)


def cast_together(tensors: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tensors of one type in another, by one call; gradients of those that learn come back by one call too."""
    made: tuple[torch.Tensor, ...] = _Together.apply(dtype, *tensors)  # type: ignore[no-untyped-call]
    return made


class _Together(torch.autograd.Function):
    """Casts a list of tensors."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        ctx.set_materialize_grads(False)
        made = _copies(tensors, dtype)
        ctx.mark_non_differentiable(*(m for m, t in zip(made, tensors, strict=True) if not t.requires_grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # to be derived once more, which a call for all cannot be
            return (None, *(None if g is None else g.to(ctx.dtype) for g in gradients))
        made = iter(_copies([g for g in gradients if g is not None], ctx.dtype))
        return (None, *(None if g is None else next(made) for g in gradients))


def _copies(tensors: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors in another type, laid out as they were: then CUDA has one kernel for all of them (2.11's
    ForeachBinaryOpList.cu), without temporaries."""
    made = [torch.empty_like(t, dtype=dtype) for t in tensors]
    if made:
        torch._foreach_copy_(made, list(tensors))
    return made
