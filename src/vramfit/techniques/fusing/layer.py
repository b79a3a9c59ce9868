"""A layer as one function, with a backward of its own: norms after or before its parts, gated or not, heads turned or
not.

Between matrix products, autocast reads and writes the whole row for every little thing: casts, dropout, residuals,
norms, positions, gates, sums of gradients. Here `operators` do that in one go; queries, keys and values are one
product; weights are cast by one call and again in backward; and backward makes what the activation gave anew, so that
forward need not keep it. The host, which calls a dozen operators a layer instead of a hundred, is seldom waited for.

The residual stream has the type that it has in the model (under autocast fp32), and every product has the operands that
it has there. What is rounded elsewhere: sums of 16-bit gradients, which are fp32 here, and turned heads and gates,
which are rounded once. Where nothing learns, nothing is kept.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from vramfit.techniques.fusing.backward import run_backward
from vramfit.techniques.fusing.operators import activate, fused_glu, fused_norm, fused_rotary
from vramfit.techniques.fusing.pieces import (
    AFTER_ATTENTION,
    INSIDE,
    LayerShape,
    PackedRow,
    Weights,
    attend,
    heads,
)
from vramfit.techniques.packing.attention import FLASH_TYPES


class FusedLayer(torch.autograd.Function):
    """Hidden states, one row of sequences → the same, a layer further.

    Parameters come as weight and bias of the linear layers, in the order of their use, and of the two norms.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        ends: torch.Tensor,
        longest: int,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        shape: LayerShape,
        dtype: torch.dtype,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        made, kept = compute(PackedRow(hidden, ends, longest, cos, sin), shape, dtype, parameters, keeps=True)
        ctx.save_for_backward(*kept, *parameters)
        ctx.longest, ctx.shape, ctx.input_shape = longest, shape, hidden.shape
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return run_backward(ctx, grad)


def compute(
    row: PackedRow, shape: LayerShape, dtype: torch.dtype, parameters: Any, *, keeps: bool
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The layer's output, and what backward needs, if that is to be kept."""
    run = _Forward(row, shape, dtype, parameters, keeps=keeps)
    made = run.pre() if shape.is_pre else run.post()
    return made.view(row.hidden.shape), run.kept


class _Forward:
    def __init__(self, row: PackedRow, shape: LayerShape, dtype: torch.dtype, parameters: Any, *, keeps: bool) -> None:
        self.row, self.shape, self.dtype, self.keeps = row, shape, dtype, keeps
        self.before = row.hidden.reshape(-1, row.hidden.shape[-1]).contiguous()
        self.w, self.norms = Weights(parameters, shape, dtype), parameters[-4:]
        self.seeds = None
        if any(shape.dropout) or shape.inner_dropout:
            num_seeds = INSIDE + 1 if shape.inner_dropout else INSIDE
            self.seeds = torch.randint(2**31 - 1, (num_seeds,), device=self.before.device)
        self.cos, self.sin = (
            None if t is None else t.reshape(len(self.before), shape.head_size).contiguous() for t in (row.cos, row.sin)
        )
        self.kept: list[torch.Tensor | None] = [row.ends, self.seeds, self.cos, self.sin] if keeps else []

    def post(self) -> torch.Tensor:
        """Where norms come after the two parts of the layer."""
        before, keeps = self.before, self.keeps
        self._keep(None, None)
        after = self._attention(before.to(self.dtype))
        summed = torch.empty_like(before) if keeps else None
        middle = torch.empty_like(before)
        narrow = torch.empty_like(before, dtype=self.dtype) if keeps or before.dtype != self.dtype else None
        stats = _stats(before)
        self._norm(0, after, before, summed, middle, narrow, stats)
        self._keep(summed, stats)
        del after, stats
        down = self._feed_forward(middle if narrow is None else narrow)
        del narrow
        made, stats = torch.empty_like(before), _stats(before)
        self._norm(1, down, middle, middle if keeps else None, made, None, stats)
        self._keep(middle, stats)  # `middle` has the second sum now
        return made

    def pre(self) -> torch.Tensor:
        """Where norms come before them."""
        before, shape = self.before, self.shape
        if shape.has_first_norm:
            x, stats = torch.empty_like(before, dtype=self.dtype), _stats(before)
            weight, bias = self.norms[:2]
            fused_norm(None, before, weight, bias, None, 0, 0.0, shape.eps[0], shape.rms, None, x, None, stats)
            self._keep(before, stats)
        else:
            x = before.to(self.dtype)
            self._keep(before, None)
        after = self._attention(x)
        del x
        summed, narrow = torch.empty_like(before), torch.empty_like(before, dtype=self.dtype)
        stats = _stats(before)
        self._norm(1, after, before, summed, narrow, None, stats, AFTER_ATTENTION)
        self._keep(summed, stats)
        del after, stats
        down = self._feed_forward(narrow)
        self._keep(None, None)
        return torch.add(summed, down) if self.keeps else summed.add_(down)

    def _norm(
        self, which: int, x: Any, residual: Any, summed: Any, out: Any, narrow: Any, stats: Any, drop: int | None = None
    ) -> None:
        """One of the two norms, of a sum."""
        weight, bias = self.norms[2 * which : 2 * which + 2]
        drop = which if drop is None else drop
        p = self.shape.dropout[drop]
        seeds = self.seeds if p else None
        eps, rms = self.shape.eps[which], self.shape.rms
        fused_norm(x, residual, weight, bias, seeds, drop, p, eps, rms, summed, out, narrow, stats)

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        """What attention's product gives."""
        w, shape = self.w, self.shape
        qkv = _product(x, w.qkv, w.qkv_bias)
        if not self.keeps:
            del w.qkv, w.qkv_bias  # what was put together for it
        if self.cos is not None:
            fused_rotary(qkv, self.cos, self.sin, shape.num_heads + shape.num_others, shape.head_size)
        attended = attend(heads(qkv, shape), self.row.ends, self.row.longest, shape)
        self._keep(x, qkv, *attended)
        del qkv
        out = attended[0].view(len(x), -1)
        del attended
        return _product(out, w.out, w.out_bias)

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the feed-forward part's last product gives."""
        w, shape = self.w, self.shape
        up = _product(x, w.up, w.up_bias)
        if shape.is_gated:
            active = up.new_empty(len(up), up.shape[1] // 2)
            seeds = self.seeds if shape.inner_dropout else None
            fused_glu(up, seeds, INSIDE, shape.inner_dropout, shape.act, active)
        else:
            active = activate(up, shape.act)
        self._keep(x, up)
        del up
        return _product(active, w.down, w.down_bias)

    def _keep(self, *tensors: torch.Tensor | None) -> None:
        if self.keeps:
            self.kept += tensors


def _stats(rows: torch.Tensor) -> torch.Tensor:
    """A place for means and scales."""
    return rows.new_empty(2, len(rows), dtype=torch.float32 if rows.dtype in FLASH_TYPES else rows.dtype)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
