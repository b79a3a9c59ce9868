"""What CUDA does otherwise than a CPU, as far as memory shows it: fused attention, and dropout with a mask of bytes.

On a CPU, attention with dropout writes its scores out, and dropout keeps its mask in full precision; an emulated GPU
would run out where a real one does not. Here both keep what a GPU's kernels keep. Values are computed by the CPU's own
kernels, out of sight.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

Meet = Callable[[torch.Tensor], None]
"""Gives a tensor its place in the emulated memory."""


class Kernels(TorchFunctionMode):
    """Takes the place of some functions while it is active.

    Args:
        meet: called with every tensor that a kernel would request.
    """

    def __init__(self, meet: Meet) -> None:
        super().__init__()
        self._meet = meet

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not _learns_mask(*args, **kwargs):
            return self._attention(*args, **kwargs)
        if func is F.dropout and not kwargs.get("inplace"):
            return _dropout(*args, **kwargs)
        if func is torch.Tensor.backward:
            return self._backward(*args, **kwargs)
        return func(*args, **kwargs)

    def _backward(
        self,
        loss: torch.Tensor,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = (),
    ) -> None:
        """Layers that are computed again in backward need the mode too: torch has taken it off here."""
        if gradient is None and loss.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        chosen = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ())
        with self:
            gradient = torch.ones_like(loss) if gradient is None else gradient
            keep = create_graph if retain_graph is None else retain_graph
            _engine_run_backward(
                (loss,),
                (gradient,),
                keep,
                create_graph,
                chosen,
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.dtype != torch.bool else attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, torch.full((), float("-inf"), dtype=query.dtype))
        settings = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        made: torch.Tensor = _Fused.apply(query, key, value, attn_mask, settings, self._meet)
        return made


def _learns_mask(*args: Any, attn_mask: Any = None, **kwargs: Any) -> bool:
    """Whether what is added to the scores learns: then torch's own code is left alone."""
    mask = args[3] if len(args) > 3 else attn_mask
    return mask is not None and bool(mask.requires_grad)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


class _Fused(torch.autograd.Function):
    """Attention that keeps its inputs, its output and a number a row; backward makes the scores anew."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, settings: dict[str, Any], meet: Meet) -> Any:
        for given in (query, key, value) if mask is None else (query, key, value, mask):
            meet(given)
        with _disable_current_modes():
            ctx.generator = torch.get_rng_state() if settings["dropout_p"] else None
            out = F.scaled_dot_product_attention(query, key, value, mask, **settings)
            rows = torch.empty(query.shape[:-1], dtype=torch.float32)
        meet(out)
        meet(rows)
        ctx.save_for_backward(query, key, value, mask, out, rows)
        ctx.settings, ctx.meet = settings, meet
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        query, key, value, mask, _, _ = ctx.saved_tensors
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
        ):
            if ctx.generator is not None:
                torch.set_rng_state(ctx.generator)
            query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
            out = F.scaled_dot_product_attention(query, key, value, mask, **ctx.settings)
            gradients = torch.autograd.grad(out, (query, key, value), grad)
        for gradient in gradients:
            ctx.meet(gradient)
        return (*gradients, None, None, None)
