"""The Triton kernel of `eight_bit_step`; imported only where there is a GPU."""

import torch
import triton
import triton.language as tl

from vramfit.techniques.adamw_8bit import BLOCK, LEAST_SCALE, MIX1, MIX2, SPREAD

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
    seed: int = 0,
) -> None:
    """Step one parameter on its GPU."""
    num_blocks = weight.numel() // BLOCK
    with torch.cuda.device(weight.device):
        _step[(triton.cdiv(num_blocks, ROWS),)](
            weight, grad, average, average_scale, square, square_scale, tables, num_blocks, seed, *settings,
            LEAST_SCALE, ROWS, BLOCK, bool(seed) and weight.dtype == torch.bfloat16, SPREAD, MIX1, MIX2,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks", "seed"])
def _step(
    weight, grad, average, average_scale, square, square_scale, tables, num_blocks, seed,
    lr, kept, new_average, new_square, eps, correction1, correction2,
    LEAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BY_CHANCE: tl.constexpr, SPREAD: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr,
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
    if BY_CHANCE:
        w = _by_chance(w, at, seed, SPREAD, MIX1, MIX2)
    tl.store(weight + at, w.to(weight.dtype.element_ty), mask=all_inside)
    _write(m, average, average_scale, tables + BLOCK, at, rows, all_inside, inside, LEAST)
    _write(v, square, square_scale, tables + 3 * BLOCK, at, rows, all_inside, inside, LEAST)


@triton.jit
def _by_chance(value, at, seed, SPREAD: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr):
    """As `eight_bit_step.by_chance`."""
    x = at.to(tl.uint32) * tl.full([], SPREAD, tl.uint32) + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * tl.full([], MIX1, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], MIX2, tl.uint32)
    chance = (x ^ (x >> 16)) >> 16
    bits = value.to(tl.uint32, bitcast=True)
    rounded = ((bits + chance) & tl.full([], 0xFFFF0000, tl.uint32)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F800000) != 0x7F800000, rounded, value)


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
