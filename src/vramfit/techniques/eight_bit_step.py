"""The step of one parameter with 8-bit moments, as an operator: a Triton kernel on a GPU, plain torch on a CPU.

It is an operator of its own so that a trace and an emulated GPU see what the kernel is: one call that writes in place
and requests nothing. A weight in bfloat16 is rounded up or down by chance, the nearer the likelier, so that updates
much smaller than its last bit count on average. Chance is a function of the seed and of the weight's place: the same
step done again is the same.
"""

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

BLOCK = 256
"""Weights that share a scale."""
LEAST_SCALE = 1e-12
PIECE = 4096 * BLOCK
"""Weights stepped at once on a CPU, whose temporaries are some times as large."""
SPREAD, MIX1, MIX2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
"""Of the hash: the golden ratio, and the multipliers of "lowbias32" (Wellons, hash-prospector)."""

_LIBRARY: Any = torch.library.Library("vramfit", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "eight_bit_step(Tensor(a!) weight, Tensor grad, Tensor(b!) average, Tensor(c!) average_scale, "
    "Tensor(d!) square, Tensor(e!) square_scale, Tensor tables, float lr, float kept, float new_average, "
    "float new_square, float eps, float correction1, float correction2, *, int seed=0) -> ()"
)


def tables(device: torch.device) -> torch.Tensor:
    """Four rows of 256: the values of codes and the boundaries between them, with a sign (first moment) and without.

    A value becomes the number of boundaries that it reaches; the last of a row is never reached. A second moment that
    is not zero never becomes zero: divided by it, a first moment that lives on would be a huge step. (torchao rounds
    it to zero.)
    """
    made = _host_tables()
    return torch.empty_like(made, device=device) if device.type == "meta" else made.to(device, copy=True)


@cache
def _host_tables() -> torch.Tensor:
    rows = []
    with _disable_current_modes():
        for signed in (True, False):
            values = torch.tensor(code_values(signed), dtype=torch.float32)
            rows += [values, torch.cat([(values[:-1] + values[1:]) / 2, torch.tensor([torch.inf])])]
        made = torch.stack(rows)
        made[3, 0] = torch.finfo(torch.float32).tiny
        return made


@cache
def code_values(signed: bool) -> tuple[float, ...]:
    """The dynamic map (arXiv 1511.04561): seven decades, each with twice the values of the one below; zero and one."""
    values = [0.0, 1.0]
    for decade in range(7):
        num_values = 2 ** (decade + (0 if signed else 1))
        bounds = torch.linspace(0.1, 1, num_values + 1)
        middles = (10.0 ** (decade - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        values += middles
        values += [-value for value in middles] if signed else []
    return tuple(sorted(values))


def _on_cpu(
    weight: torch.Tensor,
    grad: torch.Tensor,
    average: torch.Tensor,
    average_scale: torch.Tensor,
    square: torch.Tensor,
    square_scale: torch.Tensor,
    tables: torch.Tensor,
    *settings: float,
    seed: int = 0,
) -> None:
    flat = [t.view(-1) for t in (weight, grad, average, square)]
    for begin in range(0, weight.numel(), PIECE):
        w, g, m, v = (t[begin : begin + PIECE].view(-1, BLOCK) for t in flat)
        blocks = slice(begin // BLOCK, (begin + PIECE) // BLOCK)
        stepped = _step_blocks(w, g, (m, average_scale[blocks]), (v, square_scale[blocks]), tables, *settings)
        w.copy_(by_chance(stepped, seed, begin) if seed and weight.dtype == torch.bfloat16 else stepped)


def _step_blocks(
    weight: torch.Tensor,
    grad: torch.Tensor,
    average: tuple[torch.Tensor, torch.Tensor],
    square: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    lr: float,
    kept: float,
    new_average: float,
    new_square: float,
    eps: float,
    correction1: float,
    correction2: float,
) -> torch.Tensor:
    """The weights after the step, in fp32; moments are rounded after they have been used.

    So a first step is that of AdamW. What is near one or zero comes as it is needed: `kept` is what decay leaves of a
    weight, `new_average` and `new_square` the shares of the gradient and of its square. In fp32, 1 - 0.999 would be off
    by 5e-5.
    """
    g = grad.float()
    m = _read(average, tables[0]).lerp_(g, new_average)
    v = _read(square, tables[2]).lerp_(g.square(), new_square)
    _write(m, average, tables[1])
    _write(v, square, tables[3])
    w = weight.float().mul(kept)
    return w.addcdiv_(m.div_(correction1), v.sqrt_().div_(correction2).add_(eps), value=-lr)


def by_chance(value: torch.Tensor, seed: int, begin: int) -> torch.Tensor:
    """Numbers of fp32 that bfloat16 has, each the one above or below, the nearer the likelier.

    Args:
        seed: of the chance.
        begin: the place of the first number, since chance goes by places.
    """
    at = torch.arange(begin, begin + value.numel(), device=value.device).view(value.shape)
    x = (at * SPREAD + seed) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * MIX1) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * MIX2) & 0xFFFFFFFF
    chance = ((x ^ (x >> 16)) >> 16).int()
    rounded = ((value.view(torch.int32) + chance) & -0x10000).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value)


def _read(moment: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    codes, scale = moment
    return values[codes.int()].mul_(scale[:, None])


def _write(value: torch.Tensor, moment: tuple[torch.Tensor, torch.Tensor], boundaries: torch.Tensor) -> None:
    codes, scale = moment
    scale.copy_(value.abs().amax(1).clamp_min_(LEAST_SCALE))
    codes.copy_(torch.bucketize(value / scale[:, None], boundaries, right=True))


def _on_gpu(*arguments: Any, seed: int = 0) -> None:
    from vramfit.techniques.eight_bit_kernel import launch

    launch(*arguments, seed=seed)


_LIBRARY.impl("eight_bit_step", _on_cpu, "CPU")
_LIBRARY.impl("eight_bit_step", _on_gpu, "CUDA")
_LIBRARY.impl("eight_bit_step", lambda *arguments, **settings: None, "Meta")
eight_bit_step = torch.ops.vramfit.eight_bit_step.default
