"""`Touch`: a pass that computes nothing, so that what waits on parameters runs: DDP's hooks, and those who ask when."""

from typing import Any

import torch


class Touch(torch.autograd.Function):
    """Gives no gradients: hooks run, in the engine's order, and find those that are there."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *touched: torch.Tensor) -> torch.Tensor:
        ctx.num = 1 + len(touched)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None,) * ctx.num
