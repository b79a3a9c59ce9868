"""Four operators of fused layers: what products leave between them, in one reading and one writing of memory each.

They write into what they are given and ask for no memory of their own, so that a trace sees all of it. A GPU runs
`fused_kernels`, the meta device nothing; a CPU runs what stands here, which says what the kernels compute.

Sums over all rows, such as a bias's gradient, are left in `parts`: `NUM_PARTS` rows of partial sums in fp32, from a
column `place` on, which whoever called adds up at once, in the same order every time.
"""

from typing import Any

import torch
import torch.nn.functional as F

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
            from vramfit.techniques import fused_kernels

            getattr(fused_kernels, name)(*args)
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
