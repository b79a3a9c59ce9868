"""`FrozenLinear`: an int8 layer that gradients pass through, without its weight in full waiting for them.

torchao multiplies by the dequantized weight, which autograd then keeps until backward: every layer's weight would lie
there twice, once as int8 and once in full, and training would take more than without quantization. Here the weight
is dequantized for the product and let go, and once more in backward.
"""

from typing import Any

import torch
import torch.nn.functional as F


class FrozenLinear(torch.nn.Linear):
    """A linear layer whose int8 weight, and bias, do not learn."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return product


def dequantized(weight: Any) -> torch.Tensor:
    """An int8 weight in full: each group of a row times its scale, in the type it was quantized from.

    The zero points are all zero: the weights are quantized symmetrically.
    """
    rows, num_groups = weight.scale.shape
    full: torch.Tensor = weight.qdata.view(rows, num_groups, -1) * weight.scale.unsqueeze(-1)
    return full.view(weight.qdata.shape).to(weight.dtype)


class _Product(torch.autograd.Function):
    """x·Wᵀ + b; the gradient of x only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: torch.nn.Linear) -> torch.Tensor:
        ctx.weight, ctx.dtype = linear.weight, x.dtype
        return F.linear(x, dequantized(linear.weight), linear.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        weight = dequantized(ctx.weight).to(gradient.dtype)
        return torch.matmul(gradient, weight).to(ctx.dtype), None
