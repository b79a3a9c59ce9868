"""Weights in 4 bits as QLoRA has them: torchao's `NF4Tensor`, filled and read in pieces.

Each block of 64 weights shares a scale, weights are the nearest of 16 values that are dense where a normal distribution
is, and scales are quantized to 8 bits in turn. torchao compares every weight with all 16 values to quantize it, and
looks both halves of a byte up by indices of 64 bits to read it, which takes many times the weight's bytes for a moment.
Here the nearest value is found among the boundaries between them, and a byte stands for two weights in one table.
"""

import math
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch

from vramfit.errors import MissingExtra

BLOCK, SCALE_BLOCK = 64, 256
"""Weights that share a scale, and scales that share one; torchao's own defaults."""
ROWS = 8
"""Rows of a matrix that are whole blocks, where it has a multiple of 8 columns."""


def layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """What a matrix of this size becomes, without data.

    Raises:
        MissingExtra: torchao is not installed, or has it in another place.
    """
    num_blocks = rows * columns // BLOCK
    empty = torch.empty(rows, columns, dtype=dtype, device="meta")
    return _kind().from_tensor(empty, BLOCK, math.gcd(num_blocks, SCALE_BLOCK))


def fill(parts: dict[str, torch.Tensor], pieces: Iterable[torch.Tensor], table: torch.Tensor | None = None) -> None:
    """Write the 4-bit form of a matrix where it is to lie.

    Args:
        parts: the inner tensors of a layout, on a device.
        pieces: the matrix, some rows at a time, each of whole blocks; on the same device.
        table: the 16 values; None takes torchao's.
    """
    values = _values(parts["nf4"].dtype) if table is None else table
    parts["nf4"].copy_(values)
    exact = _values(torch.float32).to(parts["nf4"].device)
    boundaries = (exact[1:] + exact[:-1]) / 2
    largest, begin = [], 0
    for piece in pieces:
        blocks = piece.detach().reshape(-1, BLOCK)
        most = blocks.abs().amax(1)
        shares = blocks.float() / most.float().clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        codes = torch.bucketize(shares, boundaries, out_int32=True).to(torch.uint8).view(-1, 2)
        both = codes[:, 0] << 4 | codes[:, 1]
        parts["quantized_data"][begin : begin + len(both)].copy_(both)
        begin += len(both)
        largest.append(most)
    scales = torch.cat(largest)
    shared = len(scales) // len(parts["quantization_factor"])
    quantized, factor, mean = _kind().double_quantize_scalers(scales, 1, shared)
    for name, made in (("quantized_scalers", quantized), ("quantization_factor", factor), ("scaler_mean", mean)):
        parts[name].copy_(made)


def dequantized(weight: Any) -> torch.Tensor:
    """A 4-bit weight in full, in the type that it was quantized from; what torchao computes, bit by bit."""
    values = weight.nf4
    pairs = torch.stack([values.repeat_interleave(len(values)), values.repeat(len(values))], dim=1)
    full = pairs.index_select(0, weight.quantized_data.int()).view(-1, BLOCK)
    factor = weight.quantization_factor
    scales = weight.quantized_scalers.view(len(factor), -1) / factor[:, None]
    scales = scales.flatten().to(full.dtype) + weight.scaler_mean
    return full.mul_(scales[:, None]).view(weight.shape)


def is_nf4(weight: Any) -> bool:
    """Whether a weight is of this form."""
    return hasattr(weight, "quantized_scalers")


def _values(dtype: torch.dtype) -> torch.Tensor:
    """The 16 values, as torchao has them."""
    made: torch.Tensor = _kind().from_tensor(torch.ones(1, BLOCK, dtype=dtype), BLOCK, 1).nf4
    return made


def _kind() -> Any:
    try:
        return import_module("torchao.quantization").NF4Tensor
    except (ImportError, AttributeError):
        raise MissingExtra("quantize nf4", extra="train", package="torchao 0.18 or newer") from None
