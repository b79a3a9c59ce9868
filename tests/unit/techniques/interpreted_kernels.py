"""Run with TRITON_INTERPRET=1: every Triton kernel of fused layers beside its reference; prints how far apart they are.

The interpreter needs no GPU: a kernel's programs run one after the other, as Python.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch

from vramfit.techniques.fusing import gated_kernels, kernels, operators

NUM_PARTS = 5
"""Instead of hundreds of programs."""
ROWS, WIDTH = 37, 48
DEVICE = "cpu"
"""Where kernels run."""


def launch(kernel: Any, grid: Any, args: Any, *_: Any) -> None:
    """Without what a GPU needs."""
    kernel[grid](*args)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=draw).to(dtype)


def apart(name: str, *args: Any) -> float:
    """How far what a kernel has written is from what its reference has, as a share of the largest."""
    both = [[a.clone().to(at) if isinstance(a, torch.Tensor) else a for a in args] for at in (DEVICE, "cpu")]
    module = kernels if hasattr(kernels, name) else gated_kernels
    getattr(module, name)(*both[0])
    getattr(torch.ops.vramfit, name)(*both[1])
    both[0] = [a.cpu() if isinstance(a, torch.Tensor) else a for a in both[0]]
    found = 0.0
    for one, other in zip(*both, strict=True):
        if isinstance(one, torch.Tensor):
            if one.shape[0] == NUM_PARTS:  # sums in another order, of other parts
                one, other = one.sum(0), other.sum(0)
            found = max(found, float((one.double() - other.double()).abs().max() / other.double().abs().max()))
    return found


def norms(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Every way in which norms are called."""
    x, narrow = drawn(ROWS, WIDTH, dtype=dtype), drawn(ROWS, WIDTH, dtype=dtype, seed=1)
    residual, grad = drawn(ROWS, WIDTH, seed=2), drawn(ROWS, WIDTH, seed=3)
    weight, bias, empty, stats = drawn(WIDTH), drawn(WIDTH, seed=4), torch.zeros(ROWS, WIDTH), torch.zeros(2, ROWS)
    parts = torch.zeros(NUM_PARTS, 3 * WIDTH + 5)
    for rms in (False, True):
        for b in (None, bias):
            last = (rms, empty, empty.clone(), empty.to(dtype), stats)
            yield "post", apart("fused_norm", x, residual, weight, b, None, 0, 0.0, 1e-5, *last)
            last = (rms, None, empty, None, stats)
            yield "post alone", apart("fused_norm", x, residual, weight, b, None, 0, 0.0, 1e-5, *last)
            last = (rms, None, empty.to(dtype), None, stats)
            yield "alone", apart("fused_norm", x, narrow, weight.to(dtype), b, None, 0, 0.0, 1e-5, *last)
            yield "first", apart("fused_norm", None, residual, weight, b, None, 0, 0.0, 1e-5, *last)
            last = (rms, empty.to(dtype), empty.to(dtype), None, stats)
            yield "pre alone", apart("fused_norm", x, narrow, weight.to(dtype), b, None, 0, 0.0, 1e-5, *last)
        seen = torch.stack([torch.zeros(ROWS) if rms else residual.mean(1), residual.std(1).reciprocal()])
        for given, pre, to_x in ((None, False, x), (narrow, False, x), (narrow, True, x), (narrow, True, None)):
            args = (grad, given, residual, seen, weight, None, 0, 0.0, rms, pre, empty, to_x, parts, 5)
            yield "backward", apart("fused_norm_backward", *args)


def parts_of_a_layer(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Activations, gates, turned heads, and what is put together."""
    wide, sums = 1300, torch.zeros(NUM_PARTS, 2 * 1300 + 5)
    for act in (operators.GELU, operators.GELU_TANH, operators.SILU):
        for parts in (None, sums):
            x, grad = drawn(ROWS, wide, dtype=dtype), drawn(ROWS, wide, dtype=dtype, seed=1)
            yield "activation", apart("fused_gelu_backward", x, grad, torch.empty_like(x), parts, 5, act)
            up = drawn(ROWS, 2 * wide, dtype=dtype)
            yield "gate", apart("fused_glu", up, None, 2, 0.0, act, torch.empty_like(x))
            args = (up, grad, None, 2, 0.0, act, torch.empty_like(up), parts, 5)
            yield "gate backward", apart("fused_glu_backward", *args)
    three = [drawn(ROWS, WIDTH, dtype=dtype, seed=n) for n in range(3)]
    parts = torch.zeros(NUM_PARTS, 3 * WIDTH + 5)
    yield "join", apart("fused_join", *three, torch.empty(ROWS, 3 * WIDTH, dtype=dtype), parts, 5)
    for num_heads, others, size in ((4, 4, 16), (6, 2, 24), (3, 1, 80)):
        turns = [drawn(ROWS, size, seed=n) for n in range(2)]
        whole = (num_heads + 2 * others) * size
        for cos, sin in (turns, [t.to(dtype) for t in turns]):
            row = drawn(ROWS, whole, dtype=dtype)
            yield "rotary", apart("fused_rotary", row, cos, sin, num_heads + others, size)
        each = [drawn(ROWS, n, size, dtype=dtype, seed=n) for n in (num_heads, others, others)]
        for place in (None, torch.zeros(NUM_PARTS, whole + 5)):
            for both in ((None, None), turns):
                yield "join heads", apart("fused_join_heads", *each, *both, torch.empty_like(row), place, 5)


def dropout() -> dict[str, float]:
    """The share that is dropped, and how many elements forward and backward disagree about."""
    rows, width, p, seeds = 200, 512, 0.25, torch.tensor([3, 4, 5])
    ones, nothing = torch.ones(rows, width), torch.zeros(rows, width)
    summed, out, stats = nothing.clone(), nothing.clone(), torch.zeros(2, rows)
    kernels.fused_norm(ones, nothing, ones[0], None, seeds, 1, p, 1e-5, True, summed, out, None, stats)
    to_x, parts = nothing.clone(), torch.zeros(NUM_PARTS, 3 * width)
    args = (ones, ones, ones, torch.stack([stats[0], ones[:, 0]]), ones[0], seeds, 1, p, True, True)
    kernels.fused_norm_backward(*args, nothing.clone(), to_x, parts, 0)
    wide = 1500
    up, made = torch.ones(rows, 2 * wide), torch.zeros(rows, wide)
    gated_kernels.fused_glu(up, seeds, 2, p, operators.SILU, made)
    again, to_up = torch.ones(rows, wide), torch.zeros(rows, 2 * wide)
    gated_kernels.fused_glu_backward(up, again, seeds, 2, p, operators.SILU, to_up, None, 0)
    return {
        "norm dropped": float((summed == 0).float().mean()),
        "norm disagrees": float(((summed == 0) != (to_x == 0)).sum()),
        "gate dropped": float((made == 0).float().mean()),
        "gate disagrees": float(((made == 0) != (again == 0)).sum() + ((made == 0) != (to_up[:, wide:] == 0)).sum()),
        "columns alike": float((made[:, :1024][:, : wide - 1024] == made[:, 1024:]).float().mean()),
    }


def main() -> None:
    for module in (kernels, gated_kernels):
        module.launch, module.NUM_PARTS = launch, NUM_PARTS
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, value in (*norms(dtype), *parts_of_a_layer(dtype)):
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            found[key] = max(found.get(key, 0.0), value)
    print(json.dumps({"apart": found, "dropout": dropout()}))


if __name__ == "__main__":
    main()
