"""A layer of BERT's kind under autocast as one function, with a backward of its own.

Between matrix products, autocast reads and writes the whole row for every little thing: casts, dropout, residuals,
LayerNorm, sums of gradients. Here `fused_ops` do that in one go; queries, keys and values are one product; weights are
cast by one call and again in backward; and backward makes GELU's output anew, so that forward need not keep it. The
host, which calls a dozen operators a layer instead of a hundred, is seldom waited for.

The residual stream stays in fp32, as under autocast, and every product has the operands that it has there. What is
rounded elsewhere: sums of 16-bit gradients, which are fp32 here.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

NUM_PARTS = 512
"""Programs that go through the rows: enough for any GPU of today."""

_library: Any = torch.library.Library("vramfit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "fused_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor? seeds, int which, float p, float eps,"
    " Tensor(a!) summed, Tensor(b!) out, Tensor(c!)? out16, Tensor(d!) stats) -> ()"
)
_library.define(
    "fused_norm_backward(Tensor grad, Tensor? grad16, Tensor summed, Tensor stats, Tensor weight, Tensor? seeds,"
    " int which, float p, Tensor(a!) to_residual, Tensor(b!) to_x, Tensor(c!) parts, int place) -> ()"
)
_library.define("fused_gelu_backward(Tensor x, Tensor(a!) grad, Tensor(b!) out, Tensor(c!) parts, int place) -> ()")
_library.define(
    "fused_join(Tensor first, Tensor second, Tensor third, Tensor(a!) out, Tensor(b!) parts, int place) -> ()"
)


def _fused_norm(
    x: Any, residual: Any, weight: Any, bias: Any, seeds: Any, which: int, p: float, eps: float,
    summed: Any, out: Any, out16: Any, stats: Any,
) -> None:  # fmt: skip
    """LayerNorm of a residual and of what dropout leaves of `x`; the sum, its means and scales are for backward."""
    total = _dropped(x, seeds, which, p) + residual
    mean = total.mean(1)
    scale = (total.var(1, unbiased=False) + eps).rsqrt()
    normed = (total - mean[:, None]) * scale[:, None] * weight + bias
    for place, value in ((summed, total), (out, normed), (stats[0], mean), (stats[1], scale)):
        place.copy_(value)
    if out16 is not None:
        out16.copy_(normed)


def _fused_norm_backward(
    grad: Any, grad16: Any, summed: Any, stats: Any, weight: Any, seeds: Any, which: int, p: float,
    to_residual: Any, to_x: Any, parts: Any, place: int,
) -> None:  # fmt: skip
    """Gradients of the residual and of `x`; in parts those of LayerNorm's weight and bias, and `x`'s own sums."""
    given = grad if grad16 is None else grad + grad16
    normed = (summed - stats[0][:, None]) * stats[1][:, None]
    weighted = given * weight
    level, slope = weighted.mean(1, keepdim=True), (weighted * normed).mean(1, keepdim=True)
    made = stats[1][:, None] * (weighted - level - normed * slope)
    _leave(parts, place, given * normed, given)
    to_residual.copy_(made)
    to_x.copy_(_dropped(made, seeds, which, p))
    _leave(parts, place + 2 * weight.shape[0], to_x.float())


def _gelu_backward(x: Any, grad: Any, out: Any, parts: Any, place: int) -> None:
    """GELU's gradient in place of its output's, and the output once more; in parts the gradient's sums."""
    out.copy_(F.gelu(x.float()))
    grad.copy_(torch.ops.aten.gelu_backward(grad.float(), x.float()))
    _leave(parts, place, grad.float())


def _join(first: Any, second: Any, third: Any, out: Any, parts: Any, place: int) -> None:
    """Three matrices side by side; in parts their sums."""
    torch.cat([first, second, third], 1, out=out)
    _leave(parts, place, out.float())


def _dropped(x: Any, seeds: Any, which: int, p: float) -> Any:
    if seeds is None:
        return x
    draw = torch.Generator().manual_seed(int(seeds[which]))
    return torch.where(torch.rand(x.shape, generator=draw) >= p, x / (1 - p), torch.zeros_like(x))


def _leave(parts: Any, place: int, *values: Any) -> None:
    for value in values:
        parts[:, place : place + value.shape[1]] = 0
        parts[0, place : place + value.shape[1]] = value.sum(0)
        place += value.shape[1]


def _nothing(*args: Any) -> None:
    """On the meta device."""


def _chosen(name: str) -> Any:
    """An operator; on a GPU its kernel, without torch's dispatch, which would take the host as long as the launch."""
    operator = getattr(torch.ops.vramfit, name).default

    def run(*args: Any) -> None:
        if args[0].is_cuda:
            from vramfit.techniques.fusing import kernels

            getattr(kernels, name)(*args)
        else:
            operator(*args)

    return run


for _name, _run in (
    ("fused_norm", _fused_norm),
    ("fused_norm_backward", _fused_norm_backward),
    ("fused_gelu_backward", _gelu_backward),
    ("fused_join", _join),
):
    _library.impl(_name, _run, "CPU")
    _library.impl(_name, _nothing, "Meta")

fused_norm, fused_norm_backward = _chosen("fused_norm"), _chosen("fused_norm_backward")
fused_gelu_backward, fused_join = _chosen("fused_gelu_backward"), _chosen("fused_join")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer is besides its weights."""

    num_heads: int
    scale: float
    attention_dropout: float
    dropout: tuple[float, float]
    """After attention's product, and after the second of the feed-forward part."""
    eps: tuple[float, float]


class FusedLayer(torch.autograd.Function):
    """Hidden states in fp32, one row of sequences → the same, a layer further.

    Parameters come as weight and bias of query, key, value, attention's product, wide product, narrow product, and of
    the two LayerNorms.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, ends: torch.Tensor, longest: int, shape: LayerShape, *parameters: torch.Tensor
    ) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        width, wide = hidden.shape[-1], parameters[8].shape[0]
        before = hidden.reshape(-1, width).contiguous()
        num_tokens = len(before)
        w, norms = _cast(parameters[:12], dtype), parameters[12:]
        seeds = None
        if any(shape.dropout):
            seeds = torch.randint(2**31 - 1, (2,), device=hidden.device)
        x = before.to(dtype)
        qkv = torch.addmm(w.qkv_bias, x, w.qkv.t())
        attended = _attend(_heads(qkv, shape), ends, longest, shape)
        out = attended[0].view(num_tokens, width)

        after = torch.addmm(w.out_bias, out, w.out.t())
        summed1, middle = torch.empty_like(before), torch.empty_like(before)
        x1, stats1 = torch.empty_like(x), before.new_empty(2, num_tokens)
        seeds1, seeds2 = (seeds if p else None for p in shape.dropout)
        fused_norm(
            after, before, norms[0], norms[1], seeds1, 0, shape.dropout[0], shape.eps[0], summed1, middle, x1, stats1
        )
        del after
        up = torch.addmm(w.up_bias, x1, w.up.t())
        active = F.gelu(up)
        down = torch.addmm(w.down_bias, active, w.down.t())
        del active
        made, stats2 = torch.empty_like(before), before.new_empty(2, num_tokens)
        fused_norm(
            down, middle, norms[2], norms[3], seeds2, 1, shape.dropout[1], shape.eps[1], middle, made, None, stats2
        )
        ctx.save_for_backward(
            ends, seeds, x, qkv, *attended, summed1, stats1, x1, up, middle, stats2, *parameters
        )  # `middle` has the second sum now
        ctx.longest, ctx.shape, ctx.wide, ctx.input_shape = longest, shape, wide, hidden.shape
        return made.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
        ends, seeds, x, qkv, *attended = saved[:8]
        summed1, stats1, x1, up, summed2, stats2, *given = saved[8:]
        out = attended[0]
        shape: LayerShape = ctx.shape
        width, norms = x.shape[1], given[12:]
        w = _cast(given[:12], x.dtype)
        seeds1, seeds2 = (seeds if p else None for p in shape.dropout)
        parts = summed1.new_empty(NUM_PARTS, 9 * width + ctx.wide)
        needed = ctx.needs_input_grad[4:]

        to_middle, to_down = torch.empty_like(summed2), torch.empty_like(x)
        fused_norm_backward(
            grad.reshape(-1, width).contiguous(), None, summed2, stats2, norms[2], seeds2, 1, shape.dropout[1],
            to_middle, to_down, parts, 0,
        )  # fmt: skip
        to_up, active = to_down @ w.down, torch.empty_like(up)
        fused_gelu_backward(up, to_up, active, parts, 3 * width)
        weights: list[torch.Tensor | None] = [None] * 6
        weights[5] = to_down.t() @ active if needed[10] else None
        del active, to_down
        weights[4] = to_up.t() @ x1 if needed[8] else None
        to_x1 = to_up @ w.up
        del to_up
        fused_norm_backward(
            to_middle, to_x1, summed1, stats1, norms[0], seeds1, 0, shape.dropout[0],
            to_middle, to_x1, parts, 3 * width + ctx.wide,
        )  # fmt: skip
        weights[3] = to_x1.t() @ out.view(-1, width) if needed[6] else None
        to_out = (to_x1 @ w.out).view(out.shape)
        del to_x1
        to_heads = _attend_backward(to_out, _heads(qkv, shape), attended, ends, ctx.longest, shape)
        del to_out
        to_qkv = torch.empty_like(qkv)
        fused_join(*(t.reshape(-1, width) for t in to_heads), to_qkv, parts, 6 * width + ctx.wide)
        del to_heads
        if any(needed[:6:2]):
            weights[:3] = (to_qkv.t() @ x).view(3, width, width).unbind()
        to_hidden = None
        if ctx.needs_input_grad[0]:
            to_hidden = to_middle.add_(to_qkv @ w.qkv).view(ctx.input_shape)
        del to_qkv, w
        return (to_hidden, None, None, None, *_gradients(weights, parts.sum(0), width, ctx.wide, given, needed))


@dataclass(slots=True)
class _Weights:
    """In 16 bits."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor


def _cast(parameters: Any, dtype: torch.dtype) -> _Weights:
    """The products' weights by one call; those of queries, keys and values beneath each other."""
    width = parameters[0].shape[1]
    made = _Weights(
        parameters[0].new_empty(3 * width, width, dtype=dtype),
        parameters[0].new_empty(3 * width, dtype=dtype),
        *(torch.empty_like(p, dtype=dtype) for p in parameters[6:]),
    )
    weights, biases = made.qkv.view(3, width, width).unbind(), made.qkv_bias.view(3, width).unbind()
    into = [t for pair in zip(weights, biases, strict=True) for t in pair]
    into += [made.out, made.out_bias, made.up, made.up_bias, made.down, made.down_bias]
    torch._foreach_copy_(into, list(parameters))
    return made


def _gradients(
    weights: list[torch.Tensor | None], sums: torch.Tensor, width: int, wide: int, given: Any, needed: Any
) -> list[torch.Tensor | None]:
    """In the parameters' order and type, None for what does not learn."""
    norm2, norm2_bias, down, up, norm1, norm1_bias, out, *qkv = sums.split_with_sizes(
        [*[width] * 3, wide, *[width] * 6]
    )
    biases = [*qkv, out, up, down]
    wanted = [w for w, is_needed in zip(weights, needed[:12:2], strict=True) if w is not None and is_needed]
    full = [torch.empty_like(w, dtype=given[0].dtype) for w in wanted]
    if full:
        torch._foreach_copy_(full, wanted)
    made = iter(full)
    pairs = [(next(made) if is_needed else None, bias) for bias, is_needed in zip(biases, needed[:12:2], strict=True)]
    found = [t for pair in pairs for t in pair] + [norm1, norm1_bias, norm2, norm2_bias]
    return [t if is_needed else None for t, is_needed in zip(found, needed, strict=True)]


def _heads(qkv: torch.Tensor, shape: LayerShape) -> Any:
    return qkv.view(len(qkv), 3, shape.num_heads, -1).unbind(1)


def _attend(heads: Any, ends: Any, longest: int, shape: LayerShape) -> Any:
    """Output, logsumexp, random state and what else the kernel's backward wants."""
    if ends.device.type == "cpu":
        return _attend_here(heads, ends, shape)
    return torch.ops.aten._flash_attention_forward(
        *heads, ends, ends, longest, longest, shape.attention_dropout, False, False, scale=shape.scale
    )[:4]


def _attend_backward(grad: Any, heads: Any, attended: Any, ends: Any, longest: int, shape: LayerShape) -> Any:
    """Gradients of queries, keys and values."""
    out, logsumexp, state, more = attended
    if ends.device.type == "cpu":
        return _attend_here_backward(grad, heads, state, ends, shape)
    return torch.ops.aten._flash_attention_backward(
        grad, *heads, out, logsumexp, ends, ends, longest, longest, shape.attention_dropout, False, state, more,
        scale=shape.scale,
    )  # fmt: skip


def _attend_here(heads: Any, ends: Any, shape: LayerShape) -> Any:
    """On a CPU, sequence by sequence: right, and slow."""
    state, lengths = torch.get_rng_state(), ends.diff().tolist()
    each = zip(*(t.transpose(0, 1)[None].split(lengths, 2) for t in heads), strict=True)
    made = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=shape.attention_dropout, scale=shape.scale)
        for q, k, v in each
    ]
    out = torch.cat(made, 2)[0].transpose(0, 1).contiguous()
    return out, out.new_empty(0), state, out.new_empty(0)


def _attend_here_backward(grad: Any, heads: Any, state: Any, ends: Any, shape: LayerShape) -> Any:
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        given = [t.detach().contiguous().requires_grad_() for t in heads]
        return torch.autograd.grad(_attend_here(given, ends, shape)[0], given, grad)
