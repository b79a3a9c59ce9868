"""The Triton kernels of BERT's layers, and of every norm; imported only where there is a GPU."""

from typing import Any

import torch
import triton
import triton.language as tl

from vramfit.techniques.fusing.operators import NUM_PARTS

WIDE_BLOCK, WIDE_ROWS = 1024, 2
"""Columns and rows of a tile that does not hold whole rows."""
ALIGNED = 15
"""Bits of an address that Triton found to be zero, and counts on: 16 bytes."""
HANDLES_SINCE = (3, 3)
"""The Triton version from which a compiled kernel takes all arguments of its function."""

_has_handles = tuple(int(n) for n in triton.__version__.split(".")[:2]) >= HANDLES_SINCE
_handles: dict[Any, Any] = {}


def fused_norm(x, residual, weight, bias, seeds, which, p, eps, rms, summed, out, out16, stats):
    """See `operators`."""
    num_rows, width = residual.shape
    block, rows, warps = tile_of(width)
    added, dtypes = residual if x is None else x, (out if x is None else x).dtype
    args = (added, residual, weight, weight if bias is None else bias, seeds, out if summed is None else summed, out)
    numbers = (out if out16 is None else out16, stats, num_rows, p, eps, which)
    constants = (width, block, rows, seeds is not None, out16 is not None, x is not None, summed is not None)
    constants = (*constants, rms, bias is not None)
    key = dtypes, residual.dtype, weight.dtype, out.dtype
    launch(_fused_norm, (triton.cdiv(num_rows, rows), 1, 1), (*args, *numbers, *constants), constants, warps, 4, key)


def fused_norm_backward(
    grad, grad16, summed, stats, weight, seeds, which, p, rms, pre, to_residual, to_x, parts, place
):  # fmt: skip
    """See `operators`."""
    num_rows, width = summed.shape
    block, rows, warps = tile_of(width)
    narrow = grad16 if to_x is None else to_x
    args = (grad, grad if grad16 is None else grad16, summed, stats, weight, seeds, to_residual, narrow, parts)
    numbers = (num_rows, p, which, parts.shape[1], place)
    constants = (width, block, rows, NUM_PARTS, seeds is not None, grad16 is not None, to_x is not None, pre, rms)
    launch(_fused_norm_backward, (NUM_PARTS, 1, 1), (*args, *numbers, *constants), constants, warps, 5, narrow.dtype)


def fused_gelu_backward(x, grad, out, parts, place, act):
    """See `operators`."""
    num_rows, width = x.shape
    constants = (width, WIDE_BLOCK, WIDE_ROWS, NUM_PARTS, act, parts is not None)
    sums = x if parts is None else parts
    args = (x, grad, out, sums, num_rows, sums.shape[1], place, *constants)
    launch(_gelu_backward, (NUM_PARTS, triton.cdiv(width, WIDE_BLOCK), 1), args, constants, 4, 2)


def fused_join(first, second, third, out, parts, place):
    """See `operators`."""
    num_rows, width = first.shape
    constants = (width, triton.next_power_of_2(width), WIDE_ROWS, NUM_PARTS)
    args = (first, second, third, out, parts, num_rows, parts.shape[1], place, *constants)
    launch(_join, (NUM_PARTS, 3, 1), args, constants, 4, 3)


def launch(kernel, grid, args, constants, warps, num_given, dtype=None):
    """Launch a kernel; once it is compiled, without Triton's look at every argument, which takes the host longer than
    a small kernel runs.

    Args:
        constants: those of `args` that the kernel is compiled for; with the type, they say which one it is.
        num_given: how many of the first arguments come from elsewhere, and may begin anywhere.
    """
    device = args[0].device
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            launch(kernel, grid, args, constants, warps, num_given, dtype)
        return
    start = 0
    for given in args[:num_given]:
        start |= given.data_ptr()
    key = kernel, device.index, dtype or args[0].dtype, constants
    handle = _handles.get(key)
    if handle is None or start & ALIGNED:
        made = kernel[grid](*args, num_warps=warps)
        if _has_handles and not start & ALIGNED:
            _handles[key] = made
    else:
        handle[grid](*args)


def tile_of(width: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a program's tile: all columns, and about 2,048 elements."""
    block = triton.next_power_of_2(width)
    return block, max(1, 2048 // block), 4 if block <= 2048 else 8


@triton.jit
def kept_of(seed, rows, p, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Which elements dropout keeps: by row and column alone, four a call of Philox, in as many rounds as flash's."""
    at = rows[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    a, b, c, d = tl.randint4x(seed, at, 7)
    drawn = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (ROWS, BLOCK))
    return tl.uint_to_uniform_float(drawn) >= p


@triton.jit
def share_of(value, ACT: tl.constexpr):
    """The share that an activation leaves of a value, and how fast that grows."""
    if ACT == 0:
        share = 0.5 * (1 + tl.erf(value * 0.7071067811865476))
        growth = tl.exp(-0.5 * value * value) * 0.3989422804014327
    elif ACT == 1:
        share = tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
        growth = share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * value * value)
    else:
        share = tl.sigmoid(value)
        growth = share * (1 - share)
    return share, growth


@triton.jit(do_not_specialize=["num_rows", "which"])
def _fused_norm(
    x, residual, weight, bias, seeds, summed, out, out16, stats, num_rows, p, eps, which,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPS: tl.constexpr, HAS_16: tl.constexpr,
    ADDS: tl.constexpr, SUMS: tl.constexpr, RMS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    at = rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
    if ADDS:
        value = tl.load(x + at, inside, 0.0)
        if DROPS:
            kept = kept_of(tl.load(seeds + which), rows, p, BLOCK, ROWS)
            value = tl.where(kept, value.to(tl.float32) / (1 - p), 0.0).to(x.dtype.element_ty)
        total = value.to(tl.float32) + tl.load(residual + at, inside, 0.0)
        if SUMS:
            total = total.to(summed.dtype.element_ty).to(tl.float32)
    else:
        total = tl.load(residual + at, inside, 0.0).to(tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    if not RMS:
        mean = tl.sum(total, 1) / WIDTH
    centred = tl.where(inside, total - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    w = tl.load(weight + columns, columns < WIDTH, 0.0).to(tl.float32)
    if BIASED:
        b = tl.load(bias + columns, columns < WIDTH, 0.0).to(tl.float32)
        normed = centred * scale[:, None] * w[None, :] + b[None, :]
    else:
        normed = centred * scale[:, None] * w[None, :]
    if SUMS:
        tl.store(summed + at, total, inside)
    tl.store(out + at, normed, inside)
    if HAS_16:
        tl.store(out16 + at, normed, inside)
    tl.store(stats + rows, mean, rows < num_rows)
    tl.store(stats + num_rows + rows, scale, rows < num_rows)


@triton.jit(do_not_specialize=["num_rows", "which", "stride", "place"])
def _fused_norm_backward(
    grad, grad16, summed, stats, weight, seeds, to_residual, to_x, parts, num_rows, p, which, stride, place,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    DROPS: tl.constexpr, HAS_16: tl.constexpr, ADDS: tl.constexpr, PRE: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    real = columns < WIDTH
    w = tl.load(weight + columns, real, 0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    of_x = tl.zeros((BLOCK,), tl.float32)
    for tile in range(part, tl.cdiv(num_rows, ROWS), PARTS):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & real[None, :]
        at = rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
        given = tl.load(grad + at, inside, 0.0).to(tl.float32)
        of_sum = given
        if PRE:
            given = tl.load(grad16 + at, inside, 0.0).to(tl.float32)
        elif HAS_16:
            given += tl.load(grad16 + at, inside, 0.0).to(tl.float32)
        mean = tl.load(stats + rows, rows < num_rows, 0.0)
        scale = tl.load(stats + num_rows + rows, rows < num_rows, 0.0)
        normed = tl.where(inside, (tl.load(summed + at, inside, 0.0) - mean[:, None]) * scale[:, None], 0.0)
        of_weight += tl.sum(given * normed, 0)
        of_bias += tl.sum(given, 0)
        given = given * w[None, :]
        level = tl.zeros((ROWS,), tl.float32)
        if not RMS:
            level = tl.sum(given, 1) / WIDTH
        slope = tl.sum(given * normed, 1) / WIDTH
        made = scale[:, None] * (given - level[:, None] - normed * slope[:, None])
        if PRE:
            made += of_sum
        tl.store(to_residual + at, made, inside)
        if ADDS:
            if DROPS:
                kept = kept_of(tl.load(seeds + which), rows, p, BLOCK, ROWS)
                made = tl.where(kept, made / (1 - p), 0.0)
            rounded = tl.where(inside, made, 0.0).to(to_x.dtype.element_ty)
            tl.store(to_x + at, rounded, inside)
            of_x += tl.sum(rounded.to(tl.float32), 0)
    at = parts + part.to(tl.int64) * stride + place + columns
    tl.store(at, of_weight, real)
    tl.store(at + WIDTH, of_bias, real)
    if ADDS:
        tl.store(at + 2 * WIDTH, of_x, real)


@triton.jit(do_not_specialize=["num_rows", "stride", "place"])
def _gelu_backward(
    x, grad, out, parts, num_rows, stride, place,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    ACT: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(part, tl.cdiv(num_rows, ROWS), PARTS):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & real[None, :]
        at = rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
        value = tl.load(x + at, inside, 0.0).to(tl.float32)
        share, growth = share_of(value, ACT)
        made = tl.load(grad + at, inside, 0.0).to(tl.float32) * (share + value * growth)
        rounded = made.to(grad.dtype.element_ty)
        tl.store(grad + at, rounded, inside)
        tl.store(out + at, (value * share).to(out.dtype.element_ty), inside)
        if SUMS:
            total += tl.sum(tl.where(inside, rounded.to(tl.float32), 0.0), 0)
    if SUMS:
        tl.store(parts + part.to(tl.int64) * stride + place + columns, total, real)


@triton.jit(do_not_specialize=["num_rows", "stride", "place"])
def _join(
    first, second, third, out, parts, num_rows, stride, place,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    part, third_of_row = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    real = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    given = first
    if third_of_row == 1:
        given = second
    if third_of_row == 2:
        given = third
    for tile in range(part, tl.cdiv(num_rows, ROWS), PARTS):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < num_rows)[:, None] & real[None, :]
        value = tl.load(given + rows[:, None] * WIDTH + columns[None, :], inside, 0.0)
        tl.store(out + (rows[:, None] * 3 + third_of_row) * WIDTH + columns[None, :], value, inside)
        total += tl.sum(value.to(tl.float32), 0)
    tl.store(parts + part.to(tl.int64) * stride + place + third_of_row * WIDTH + columns, total, real)
