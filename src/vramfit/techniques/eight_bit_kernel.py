"""The Triton kernel of `eight_bit_step`; imported only where there is a GPU."""

import torch
import triton
import triton.language as tl

from vramfit.techniques.eight_bit_step import BLOCK, LEAST_SCALE

ROWS = 4
"""Blocks of 256 that one program steps."""


def launch(
    weight: torch.Tensor,
    grad: torch.Tensor,
    average: torch.Tensor,
    average_scale: torch.Tensor,
    square: torch.Tensor,
    square_scale: torch.Tensor,
    tables: torch.Tensor,
    *settings: float,
) -> None:
    """Step one parameter on its GPU."""
    num_blocks = weight.numel() // BLOCK
    with torch.cuda.device(weight.device):
        _step[(triton.cdiv(num_blocks, ROWS),)](
            weight, grad, average, average_scale, square, square_scale, tables, num_blocks, *settings,
            LEAST_SCALE, ROWS, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks"])
def _step(
    weight, grad, average, average_scale, square, square_scale, tables, num_blocks,
    lr, kept, new_average, new_square, eps, correction1, correction2,
    LEAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = rows < num_blocks
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    all_inside = inside[:, None] & (at >= 0)
    w = tl.load(weight + at, mask=all_inside, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=all_inside, other=0.0).to(tl.float32)
    m = _read(average, average_scale, tables, at, rows, all_inside, inside)
    v = _read(square, square_scale, tables + 2 * BLOCK, at, rows, all_inside, inside)
    m += new_average * (g - m)
    v += new_square * (g * g - v)
    w = w * kept - lr * (m / correction1) / (tl.sqrt(v) / correction2 + eps)
    tl.store(weight + at, w.to(weight.dtype.element_ty), mask=all_inside)
    _write(m, average, average_scale, tables + BLOCK, at, rows, all_inside, inside, LEAST)
    _write(v, square, square_scale, tables + 3 * BLOCK, at, rows, all_inside, inside, LEAST)


@triton.jit
def _read(codes, scales, values, at, rows, all_inside, inside):
    code = tl.load(codes + at, mask=all_inside, other=0).to(tl.int32)
    scale = tl.load(scales + rows, mask=inside, other=0.0)
    return tl.load(values + code) * scale[:, None]


@triton.jit
def _write(value, codes, scales, boundaries, at, rows, all_inside, inside, LEAST: tl.constexpr):
    """Codes by a search without branches: how many boundaries the value reaches."""
    scale = tl.maximum(tl.max(tl.abs(value), 1), LEAST)
    value = value / scale[:, None]
    code = tl.zeros_like(value).to(tl.int32)
    for i in tl.static_range(8):
        bit = 128 >> i
        code += tl.where(value >= tl.load(boundaries + code + (bit - 1)), bit, 0)
    tl.store(codes + at, code.to(tl.uint8), mask=all_inside)
    tl.store(scales + rows, scale, mask=inside)
