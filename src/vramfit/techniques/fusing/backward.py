"""The gradients of a fused layer; what is not needed any more is let go of at once."""

from typing import Any

import torch

from vramfit.techniques.fusing.operators import (
    NUM_PARTS,
    fused_gelu_backward,
    fused_glu_backward,
    fused_join,
    fused_join_heads,
    fused_norm_backward,
)
from vramfit.techniques.fusing.pieces import (
    AFTER_ATTENTION,
    AFTER_NARROW,
    INSIDE,
    LayerShape,
    Weights,
    attend_backward,
    heads,
)

NUM_ARGUMENTS = 7
"""Of `FusedLayer`, before the parameters."""


def run_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of all arguments of `FusedLayer`."""
    run = _Backward(ctx)
    to_hidden = run.pre(grad) if run.shape.is_pre else run.post(grad)
    del run.w
    return (to_hidden, *[None] * (NUM_ARGUMENTS - 1), *run.gradients())


class _Backward:
    def __init__(self, ctx: Any) -> None:
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
        self.ends, self.seeds, self.cos, self.sin, self.first, self.stats0, self.x, self.qkv = saved[:8]
        self.attended = saved[8:12]
        self.summed1, self.stats1, self.x1, self.up, self.summed2, self.stats2 = saved[12:18]
        self.given = saved[18:]
        self.norms = saved[-4:]
        self.longest, self.input_shape = ctx.longest, ctx.input_shape
        self.shape: LayerShape = ctx.shape
        self.needs_hidden, self.needed = ctx.needs_input_grad[0], ctx.needs_input_grad[NUM_ARGUMENTS:]
        self.w = Weights(self.given, self.shape, self.x.dtype)
        width = self.x.shape[1]
        self.sizes = [3 * width, _rows(self.w.up_bias), 3 * width, _rows(self.w.qkv_bias)]
        """Of sums: three of the second norm, of the wide product, three of the first norm, and of queries, keys and
        values."""
        self.parts = self.stats1.new_empty(NUM_PARTS, sum(self.sizes))
        self.products: list[torch.Tensor | None] = [None] * 4
        """Gradients of the weights of the four products."""
        self.down_sums: torch.Tensor | None = None

    def _needs(self, first: int, num_linears: int = 1) -> bool:
        """Whether a weight learns."""
        return any(self.needed[first : first + 2 * num_linears : 2])

    def post(self, grad: torch.Tensor) -> torch.Tensor | None:
        """The gradient of hidden states, where norms come after the two parts of the layer."""
        shape, norms = self.shape, self.norms
        seeds1, seeds2 = (self.seeds if p else None for p in shape.dropout)
        to_middle, self.to_down = torch.empty_like(self.summed2), torch.empty_like(self.x)
        fused_norm_backward(
            grad.reshape(-1, self.x.shape[1]).contiguous(), None, self.summed2, self.stats2, norms[2], seeds2,
            AFTER_NARROW, shape.dropout[1], shape.rms, False, to_middle, self.to_down, self.parts, 0,
        )  # fmt: skip
        self.to_x1 = self._through_wide()
        fused_norm_backward(
            to_middle, self.to_x1, self.summed1, self.stats1, norms[0], seeds1, AFTER_ATTENTION, shape.dropout[0],
            shape.rms, False, to_middle, self.to_x1, self.parts, sum(self.sizes[:2]),
        )  # fmt: skip
        to_qkv = self._through_attention()
        if not self.needs_hidden:
            return None
        return to_middle.add_(to_qkv @ self.w.qkv).view(self.input_shape)

    def pre(self, grad: torch.Tensor) -> torch.Tensor | None:
        """The same, where norms come before them."""
        shape, norms = self.shape, self.norms
        seeds1 = self.seeds if shape.dropout[0] else None
        grad = grad.reshape(-1, self.x.shape[1]).contiguous()
        self.to_down = grad.to(self.x.dtype)
        if self.w.down_bias is not None:
            self.down_sums = self.to_down.sum(0, dtype=self.stats1.dtype)
        self.to_x1 = self._through_wide()
        to_middle = torch.empty_like(self.summed1)
        fused_norm_backward(
            grad, self.to_x1, self.summed1, self.stats1, norms[2], seeds1, AFTER_ATTENTION, shape.dropout[0],
            shape.rms, True, to_middle, self.to_x1, self.parts, 0,
        )  # fmt: skip
        to_qkv = self._through_attention()
        if not (self.needs_hidden or any(self.needed[-4:-2])):
            return None
        to_x = to_qkv @ self.w.qkv
        del to_qkv
        if not shape.has_first_norm:
            return to_middle.add_(to_x).view(self.input_shape)
        fused_norm_backward(
            to_middle, to_x, self.first, self.stats0, norms[0], None, 0, 0.0, shape.rms, True, to_middle, None,
            self.parts, sum(self.sizes[:2]),
        )  # fmt: skip
        return to_middle.view(self.input_shape)

    def _through_wide(self) -> torch.Tensor:
        """The gradient of what the feed-forward part was given."""
        shape, w, last = self.shape, self.w, len(self.given) - 6
        parts = self.parts if self.sizes[1] else None
        if shape.is_gated:
            active, to_up = self.to_down @ w.down, torch.empty_like(self.up)
            seeds = self.seeds if shape.inner_dropout else None
            fused_glu_backward(
                self.up, active, seeds, INSIDE, shape.inner_dropout, shape.act, to_up, parts, self.sizes[0]
            )
        else:
            to_up, active = self.to_down @ w.down, torch.empty_like(self.up)
            fused_gelu_backward(self.up, to_up, active, parts, self.sizes[0], shape.act)
        if self._needs(last):
            self.products[3] = self.to_down.t() @ active
        del active, self.to_down
        wide = shape.num_linears[1]
        if self._needs(last - 2 * wide, wide):
            self.products[2] = to_up.t() @ self.x1
        return to_up @ w.up

    def _through_attention(self) -> torch.Tensor:
        """The gradient of queries, keys and values, from that of attention's product."""
        shape, out = self.shape, self.attended[0]
        num_linears = shape.num_linears[0]
        if self._needs(2 * num_linears):
            self.products[1] = self.to_x1.t() @ out.view(len(out), -1)
        to_out = (self.to_x1 @ self.w.out).view(out.shape)
        del self.to_x1
        to_heads = attend_backward(to_out, heads(self.qkv, shape), self.attended, self.ends, self.longest, shape)
        del to_out
        to_qkv, place = torch.empty_like(self.qkv), sum(self.sizes[:3])
        parts = self.parts if self.sizes[3] else None
        if self.cos is None and shape.num_others == shape.num_heads and parts is not None:
            fused_join(*(t.reshape(len(out), -1) for t in to_heads), to_qkv, parts, place)
        else:
            fused_join_heads(*(t.contiguous() for t in to_heads), self.cos, self.sin, to_qkv, parts, place)
        del to_heads
        if self._needs(0, num_linears):
            self.products[0] = to_qkv.t() @ self.x
        return to_qkv

    def gradients(self) -> list[torch.Tensor | None]:
        """Of the parameters, in their order and type, None for what does not learn."""
        num_heads, num_wide = self.shape.num_linears
        counts = [num_heads, 1, num_wide, 1]
        linears = self.given[: 2 * sum(counts) : 2]
        rows = [[len(w) for w in linears[sum(counts[:n]) : sum(counts[: n + 1])]] for n in range(len(counts))]
        width, of_qkv, of_up = self.x.shape[1], *(rows[n] if self.sizes[2 * (n == 0) + 1] else [] for n in (0, 2))
        sums = self.parts.sum(0).split_with_sizes([*[width] * 3, *of_up, *[width] * 3, *of_qkv])
        (second, second_bias, second_x), (first, first_bias, first_x) = sums[:3], sums[3 + len(of_up) :][:3]
        of_pre = self.shape.is_pre
        biases = [*(sums[6 + len(of_up) :] or [None] * num_heads), second_x if of_pre else first_x]
        biases += [*(sums[3 : 3 + len(of_up)] or [None] * num_wide), self.down_sums if of_pre else second_x]
        weights: list[torch.Tensor | None] = []
        for product, each in zip(self.products, rows, strict=True):
            weights += [product] * len(each) if product is None or len(each) == 1 else product.split_with_sizes(each)
        learn = self.needed[: 2 * len(linears) : 2]
        wanted = [w for w, is_needed in zip(weights, learn, strict=True) if w is not None and is_needed]
        full = [torch.empty_like(w, dtype=self.given[0].dtype) for w in wanted]
        if full:
            torch._foreach_copy_(full, wanted)
        made = iter(full)
        pairs = [(next(made) if is_needed else None, bias) for bias, is_needed in zip(biases, learn, strict=True)]
        found = [t for pair in pairs for t in pair] + [first, first_bias, second, second_bias]
        return [t if is_needed else None for t, is_needed in zip(found, self.needed, strict=True)]


def _rows(bias: torch.Tensor | None) -> int:
    return 0 if bias is None else len(bias)
