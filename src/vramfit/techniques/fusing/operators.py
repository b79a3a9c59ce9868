"""The operators of fused layers: they write into what they are given, so that a trace sees every request.

On a CPU they are the references that stand here, in any type; on a GPU the kernels of `kernels` and `gated_kernels`.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

NUM_PARTS = 512
"""Programs that go through the rows: enough for any GPU of today."""
GELU, GELU_TANH, SILU = 0, 1, 2
"""Activations, as kernels know them."""

_library: Any = torch.library.Library("vramfit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "fused_norm(Tensor? x, Tensor residual, Tensor weight, Tensor? bias, Tensor? seeds, int which, float p, float eps,"
    " bool rms, Tensor(a!)? summed, Tensor(b!) out, Tensor(c!)? out16, Tensor(d!) stats) -> ()"
)
_library.define(
    "fused_norm_backward(Tensor grad, Tensor? grad16, Tensor summed, Tensor stats, Tensor weight, Tensor? seeds,"
    " int which, float p, bool rms, bool pre, Tensor(a!) to_residual, Tensor(b!)? to_x, Tensor(c!) parts, int place)"
    " -> ()"
)
_library.define(
    "fused_gelu_backward(Tensor x, Tensor(a!) grad, Tensor(b!) out, Tensor(c!)? parts, int place, int act) -> ()"
)
_library.define("fused_glu(Tensor up, Tensor? seeds, int which, float p, int act, Tensor(a!) out) -> ()")
_library.define(
    "fused_glu_backward(Tensor up, Tensor(a!) grad, Tensor? seeds, int which, float p, int act, Tensor(b!) out,"
    " Tensor(c!)? parts, int place) -> ()"
)
_library.define("fused_rotary(Tensor(a!) x, Tensor cos, Tensor sin, int num_heads, int size) -> ()")
_library.define(
    "fused_join(Tensor first, Tensor second, Tensor third, Tensor(a!) out, Tensor(b!) parts, int place) -> ()"
)
_library.define(
    "fused_join_heads(Tensor first, Tensor second, Tensor third, Tensor? cos, Tensor? sin, Tensor(a!) out,"
    " Tensor(b!)? parts, int place) -> ()"
)


def activate(x: Any, act: int) -> Any:
    """An activation."""
    return F.silu(x) if act == SILU else F.gelu(x, approximate="none" if act == GELU else "tanh")


def _fused_norm(
    x: Any, residual: Any, weight: Any, bias: Any, seeds: Any, which: int, p: float, eps: float, rms: bool,
    summed: Any, out: Any, out16: Any, stats: Any,
) -> None:  # fmt: skip
    """Norm of a residual and of what dropout leaves of `x`; the sum, its means and scales are for backward.

    An RMSNorm has no means, and a norm before its part of the layer no `x`.
    """
    total = _wide(residual) if x is None else _dropped(x, seeds, which, p) + _wide(residual)
    if summed is not None:
        summed.copy_(total)
        total = _wide(summed)
    mean = torch.zeros_like(total[:, 0]) if rms else total.mean(1)
    scale = ((total - mean[:, None]).square().mean(1) + eps).rsqrt()
    normed = (total - mean[:, None]) * scale[:, None] * weight
    if bias is not None:
        normed = normed + bias
    for place, value in ((out, normed), (stats[0], mean), (stats[1], scale)):
        place.copy_(value)
    if out16 is not None:
        out16.copy_(normed)


def _fused_norm_backward(
    grad: Any, grad16: Any, summed: Any, stats: Any, weight: Any, seeds: Any, which: int, p: float, rms: bool,
    pre: bool, to_residual: Any, to_x: Any, parts: Any, place: int,
) -> None:  # fmt: skip
    """Gradients of the residual and of `x`; in parts those of the norm's weight and bias, and `x`'s own sums.

    `grad` and `grad16` are both of the norm; before a part of the layer (`pre`), `grad` is of the sum.
    """
    given = _wide(grad16) if pre else grad if grad16 is None else grad + grad16
    normed = (summed - stats[0][:, None]) * stats[1][:, None]
    weighted = given * weight
    level = 0 if rms else weighted.mean(1, keepdim=True)
    slope = (weighted * normed).mean(1, keepdim=True)
    made = stats[1][:, None] * (weighted - level - normed * slope)
    made = made + grad if pre else made
    _leave(parts, place, given * normed, given)
    to_residual.copy_(made)
    if to_x is not None:
        to_x.copy_(_dropped(made, seeds, which, p))
        _leave(parts, place + 2 * weight.shape[0], _wide(to_x))


def _gelu_backward(x: Any, grad: Any, out: Any, parts: Any, place: int, act: int) -> None:
    """An activation's gradient in place of its output's, and the output once more; in parts the gradient's sums."""
    out.copy_(activate(_wide(x), act))
    grad.copy_(_activate_backward(_wide(grad), _wide(x), act))
    if parts is not None:
        _leave(parts, place, _wide(grad))


def _glu(up: Any, seeds: Any, which: int, p: float, act: int, out: Any) -> None:
    """What dropout leaves of the second half of every row, times the activation of the first."""
    first, second = _wide(up).chunk(2, 1)
    out.copy_(_dropped(activate(first, act) * second, seeds, which, p))


def _glu_backward(
    up: Any, grad: Any, seeds: Any, which: int, p: float, act: int, out: Any, parts: Any, place: int
) -> None:
    """The gradient of both halves, and the output once more in place of its gradient; in parts the former's sums."""
    first, second = _wide(up).chunk(2, 1)
    active = activate(first, act)
    given = _dropped(_wide(grad), seeds, which, p)
    out.copy_(torch.cat([_activate_backward(given * second, first, act), given * active], 1))
    grad.copy_(_dropped(active * second, seeds, which, p))
    if parts is not None:
        _leave(parts, place, _wide(out))


def _rotary(x: Any, cos: Any, sin: Any, num_heads: int, size: int) -> None:
    """The first heads of every row, turned by its position."""
    heads = x[:, : num_heads * size].unflatten(1, (num_heads, size))
    heads.copy_(_turned(heads, cos, sin, 1))


def _join(first: Any, second: Any, third: Any, out: Any, parts: Any, place: int) -> None:
    """Three matrices side by side; in parts their sums."""
    torch.cat([first, second, third], 1, out=out)
    _leave(parts, place, _wide(out))


def _join_heads(first: Any, second: Any, third: Any, cos: Any, sin: Any, out: Any, parts: Any, place: int) -> None:
    """Heads side by side, those of the first two turned back; in parts their sums."""
    turned = [first, second] if cos is None else [_turned(t, cos, sin, -1) for t in (first, second)]
    out.copy_(torch.cat([*(t.flatten(1) for t in turned), third.flatten(1)], 1))
    if parts is not None:
        _leave(parts, place, _wide(out))


def _turned(heads: Any, cos: Any, sin: Any, way: int) -> Any:
    """Heads turned there (1) or back (-1)."""
    (a, b), (c1, c2), (s1, s2) = (_wide(t).chunk(2, -1) for t in (heads, cos[:, None], sin[:, None]))
    if way > 0:
        return torch.cat([a * c1 - b * s1, b * c2 + a * s2], -1)
    return torch.cat([a * c1 + b * s2, b * c2 - a * s1], -1)


def _activate_backward(grad: Any, x: Any, act: int) -> Any:
    if act == SILU:
        return torch.ops.aten.silu_backward(grad, x)
    return torch.ops.aten.gelu_backward(grad, x, approximate="none" if act == GELU else "tanh")


def _wide(x: Any) -> Any:
    """In fp32 at the least."""
    return x if x.dtype == torch.float64 else x.float()


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


@cache
def _module(name: str) -> Any:
    return import_module(name)


def _chosen(name: str, kernels: str) -> Any:
    """An operator; on a GPU its kernel, without torch's dispatch, which would take the host as long as the launch."""
    operator = getattr(torch.ops.vramfit, name).default

    def run(*args: Any) -> None:
        if (args[1] if args[0] is None else args[0]).is_cuda:
            getattr(_module(kernels), name)(*args)
        else:
            operator(*args)

    return run


KERNELS, GATED_KERNELS = (f"vramfit.techniques.fusing.{name}" for name in ("kernels", "gated_kernels"))

for _name, _run in (
    ("fused_norm", _fused_norm),
    ("fused_norm_backward", _fused_norm_backward),
    ("fused_gelu_backward", _gelu_backward),
    ("fused_join", _join),
    ("fused_glu", _glu),
    ("fused_glu_backward", _glu_backward),
    ("fused_rotary", _rotary),
    ("fused_join_heads", _join_heads),
):
    _library.impl(_name, _run, "CPU")
    _library.impl(_name, _nothing, "Meta")

fused_norm, fused_norm_backward = (_chosen(name, KERNELS) for name in ("fused_norm", "fused_norm_backward"))
fused_gelu_backward, fused_join = (_chosen(name, KERNELS) for name in ("fused_gelu_backward", "fused_join"))
fused_glu, fused_glu_backward = (_chosen(name, GATED_KERNELS) for name in ("fused_glu", "fused_glu_backward"))
fused_rotary, fused_join_heads = (_chosen(name, GATED_KERNELS) for name in ("fused_rotary", "fused_join_heads"))
