"""The Triton kernels of gated feed-forward parts and of rotary positions; imported only where there is a GPU."""

import triton
import triton.language as tl

from vramfit.techniques.fusing.kernels import WIDE_BLOCK, WIDE_ROWS, kept_of, launch, share_of
from vramfit.techniques.fusing.operators import NUM_PARTS

HEAD_ELEMENTS = 1024
"""Of half a head in a program's tile."""


def fused_glu(up, seeds, which, p, act, out):
    """See `operators`."""
    num_rows, width = out.shape
    constants = (width, WIDE_BLOCK, WIDE_ROWS, act, seeds is not None)
    grid = (triton.cdiv(num_rows, WIDE_ROWS), triton.cdiv(width, WIDE_BLOCK), 1)
    launch(_glu, grid, (up, seeds, out, num_rows, p, which, *constants), constants, 4, 1)


def fused_glu_backward(up, grad, seeds, which, p, act, out, parts, place):
    """See `operators`."""
    num_rows, width = grad.shape
    constants = (width, WIDE_BLOCK, WIDE_ROWS, NUM_PARTS, act, seeds is not None, parts is not None)
    sums = up if parts is None else parts
    args = (up, grad, seeds, out, sums, num_rows, p, which, sums.shape[1], place, *constants)
    launch(_glu_backward, (NUM_PARTS, triton.cdiv(width, WIDE_BLOCK), 1), args, constants, 4, 2)


def fused_rotary(x, cos, sin, num_heads, size):
    """See `operators`."""
    num_rows, half = len(x), size // 2
    block, rows = _head_tile(half)
    constants = (x.shape[1], half, block, rows)
    grid = (triton.cdiv(num_rows, rows), num_heads, 1)
    launch(_rotary, grid, (x, cos, sin, num_rows, *constants), constants, 4, 3, (x.dtype, cos.dtype))


def fused_join_heads(first, second, third, cos, sin, out, parts, place):
    """See `operators`."""
    num_rows, num_heads, size = first.shape
    others = second.shape[1]
    block, rows = _head_tile(size // 2)
    constants = (num_heads, others, size // 2, block, rows, NUM_PARTS, cos is not None, parts is not None)
    turns, sums = (first, first) if cos is None else (cos, sin), out if parts is None else parts
    args = (first, second, third, *turns, out, sums, num_rows, sums.shape[1], place, *constants)
    launch(_join_heads, (NUM_PARTS, num_heads + 2 * others, 1), args, constants, 4, 5, (out.dtype, turns[0].dtype))


def _head_tile(half: int) -> tuple[int, int]:
    """Columns and rows of a program's tile: half a head."""
    block = triton.next_power_of_2(half)
    return block, max(1, HEAD_ELEMENTS // block)


@triton.jit(do_not_specialize=["num_rows", "which"])
def _glu(
    up, seeds, out, num_rows, p, which,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ACT: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    line, column = rows[:, None].to(tl.int64) * WIDTH, columns[None, :]
    first = tl.load(up + 2 * line + column, inside, 0.0).to(tl.float32)
    second = tl.load(up + 2 * line + WIDTH + column, inside, 0.0).to(tl.float32)
    share, _ = share_of(first, ACT)
    made = first * share * second
    if DROPS:
        kept = kept_of(tl.load(seeds + which), rows * tl.num_programs(1) + tl.program_id(1), p, BLOCK, ROWS)
        made = tl.where(kept, made / (1 - p), 0.0)
    tl.store(out + line + column, made.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows", "which", "stride", "place"])
def _glu_backward(
    up, grad, seeds, out, parts, num_rows, p, which, stride, place,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, ACT: tl.constexpr,
    DROPS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < WIDTH
    of_first = tl.zeros((BLOCK,), tl.float32)
    of_second = tl.zeros((BLOCK,), tl.float32)
    for tile in range(part, tl.cdiv(num_rows, ROWS), PARTS):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & real[None, :]
        line, column = rows[:, None].to(tl.int64) * WIDTH, columns[None, :]
        first = tl.load(up + 2 * line + column, inside, 0.0).to(tl.float32)
        second = tl.load(up + 2 * line + WIDTH + column, inside, 0.0).to(tl.float32)
        given = tl.load(grad + line + column, inside, 0.0).to(tl.float32)
        share, growth = share_of(first, ACT)
        active = first * share
        made = active * second
        if DROPS:
            kept = kept_of(tl.load(seeds + which), rows * tl.num_programs(1) + tl.program_id(1), p, BLOCK, ROWS)
            given = tl.where(kept, given / (1 - p), 0.0)
            made = tl.where(kept, made / (1 - p), 0.0)
        to_first = (given * second * (share + first * growth)).to(out.dtype.element_ty)
        to_second = (given * active).to(out.dtype.element_ty)
        tl.store(out + 2 * line + column, to_first, inside)
        tl.store(out + 2 * line + WIDTH + column, to_second, inside)
        tl.store(grad + line + column, made.to(grad.dtype.element_ty), inside)
        if SUMS:
            of_first += tl.sum(to_first.to(tl.float32), 0)
            of_second += tl.sum(to_second.to(tl.float32), 0)
    if SUMS:
        at = parts + part.to(tl.int64) * stride + place + columns
        tl.store(at, of_first, real)
        tl.store(at + WIDTH, of_second, real)


@triton.jit(do_not_specialize=["num_rows"])
def _rotary(
    x, cos, sin, num_rows,
    STRIDE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows)[:, None] & (columns < HALF)
    line = rows[:, None].to(tl.int64)
    at = x + line * STRIDE + tl.program_id(1) * 2 * HALF + columns
    turn = line * 2 * HALF + columns
    a = tl.load(at, inside, 0.0).to(tl.float32)
    b = tl.load(at + HALF, inside, 0.0).to(tl.float32)
    c1 = tl.load(cos + turn, inside, 0.0).to(tl.float32)
    s1 = tl.load(sin + turn, inside, 0.0).to(tl.float32)
    c2 = tl.load(cos + turn + HALF, inside, 0.0).to(tl.float32)
    s2 = tl.load(sin + turn + HALF, inside, 0.0).to(tl.float32)
    tl.store(at, (a * c1 - b * s1).to(x.dtype.element_ty), inside)
    tl.store(at + HALF, (b * c2 + a * s2).to(x.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows", "stride", "place"])
def _join_heads(
    first, second, third, cos, sin, out, parts, num_rows, stride, place,
    HEADS: tl.constexpr, OTHERS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, TURNS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    part, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    real = columns < HALF
    given, place_in, width = first, head, HEADS * 2 * HALF
    if head >= HEADS:
        given, place_in, width = second, head - HEADS, OTHERS * 2 * HALF
    if head >= HEADS + OTHERS:
        given, place_in = third, head - HEADS - OTHERS
    of_first = tl.zeros((BLOCK,), tl.float32)
    of_second = tl.zeros((BLOCK,), tl.float32)
    for tile in range(part, tl.cdiv(num_rows, ROWS), PARTS):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & real[None, :]
        line, column = rows[:, None].to(tl.int64), columns[None, :]
        at = given + line * width + place_in * 2 * HALF + column
        a = tl.load(at, inside, 0.0).to(tl.float32)
        b = tl.load(at + HALF, inside, 0.0).to(tl.float32)
        if TURNS:
            turned = inside & (head + tl.zeros((BLOCK,), tl.int32) < HEADS + OTHERS)[None, :]
            turn = line * 2 * HALF + column
            c1 = tl.load(cos + turn, turned, 1.0).to(tl.float32)
            s1 = tl.load(sin + turn, turned, 0.0).to(tl.float32)
            c2 = tl.load(cos + turn + HALF, turned, 1.0).to(tl.float32)
            s2 = tl.load(sin + turn + HALF, turned, 0.0).to(tl.float32)
            back = a * c1 + b * s2
            b = b * c2 - a * s1
            a = back
        to = out + line * (HEADS + 2 * OTHERS) * 2 * HALF + head * 2 * HALF + column
        lower, upper = a.to(out.dtype.element_ty), b.to(out.dtype.element_ty)
        tl.store(to, lower, inside)
        tl.store(to + HALF, upper, inside)
        if SUMS:
            of_first += tl.sum(lower.to(tl.float32), 0)
            of_second += tl.sum(upper.to(tl.float32), 0)
    if SUMS:
        at = parts + part.to(tl.int64) * stride + place + head * 2 * HALF + columns
        tl.store(at, of_first, real)
        tl.store(at + HALF, of_second, real)
