"""Precision: the type of the weights, autocast, and the products' inner precision."""

import torch

WEIGHTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
AUTOCAST = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}


def weight_dtype(precision: str) -> torch.dtype:
    """The type the weights live in."""
    return WEIGHTS.get(precision, torch.float32)


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The lower precision of autocast; None where there is none."""
    return AUTOCAST.get(precision)


def name_of(weights: torch.dtype, autocast: torch.dtype | None = None) -> str:
    """What weights of a type are called, under autocast to another or without.

    >>> name_of(torch.float32), name_of(torch.bfloat16), name_of(torch.float32, torch.float16)
    ('fp32', 'bf16', 'amp-fp16')
    """
    names, dtype = (WEIGHTS, weights) if autocast is None else (AUTOCAST, autocast)
    return next((name for name, of_name in names.items() if of_name is dtype), "fp32")


def apply(model: torch.nn.Module, precision: str) -> None:
    """Put the weights into their type, in place."""
    dtype = weight_dtype(precision)
    if dtype is not torch.float32:
        model.to(dtype)
