"""What a layer's forward and its backward share: its shape, its weights in 16 bits, and its attention."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from vramfit.techniques.fusing.operators import GELU
from vramfit.techniques.packing.attention import PackedHeads, attend_one_by_one

AFTER_ATTENTION, AFTER_NARROW, INSIDE = 0, 1, 2
"""Where dropout has its random numbers from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What a layer is besides its weights."""

    head_size: int
    num_heads: int
    num_others: int
    """Heads of keys, and as many of values."""
    scale: float
    causal: bool
    window: int
    """Tokens that one sees on either side; -1 for all."""
    is_turned: bool
    """Whether positions turn queries and keys."""
    is_pre: bool
    """Whether norms come before the two parts of the layer, and not after them."""
    has_first_norm: bool
    rms: bool
    eps: tuple[float, float]
    act: int
    is_gated: bool
    num_linears: tuple[int, int]
    """Modules that queries, keys and values are from, and the first products of the feed-forward part."""
    attention_dropout: float
    dropout: tuple[float, float]
    """After attention's product, and after the second of the feed-forward part."""
    inner_dropout: float
    """After a gate."""

    @property
    def is_berts(self) -> bool:
        """Whether it is the shape of BERT's layers, but for their biases."""
        is_other = self.causal or self.is_turned or self.is_pre or self.rms or self.is_gated or self.act != GELU
        return not is_other and self.window < 0 and self.num_others == self.num_heads and self.num_linears[0] > 1


class PackedRow(NamedTuple):
    """What a layer gets: hidden states of one row of sequences, where these end, and the turns of its positions."""

    hidden: torch.Tensor
    ends: torch.Tensor
    longest: int
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None


class Weights:
    """Of the products, in the type that they have: cast by one call, those of one product beneath each other."""

    def __init__(self, parameters: Any, shape: LayerShape, dtype: torch.dtype) -> None:
        self._from: list[torch.Tensor] = []
        self._into: list[torch.Tensor] = []
        of_heads, of_wide = (2 * n for n in shape.num_linears)
        ends = [0, of_heads, of_heads + 2, of_heads + 2 + of_wide, of_heads + of_wide + 4]
        groups = [parameters[start:end] for start, end in pairwise(ends)]
        self.qkv, self.qkv_bias = self._laid(groups[0], dtype)
        self.out, self.out_bias = self._laid(groups[1], dtype)
        self.up, self.up_bias = self._laid(groups[2], dtype)
        self.down, self.down_bias = self._laid(groups[3], dtype)
        if self._into:
            torch._foreach_copy_(self._into, self._from)
        del self._into, self._from

    def _laid(self, group: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of a product; None where it has no bias."""
        weights, biases = group[::2], group[1::2]
        if len(weights) == 1 and weights[0].dtype == dtype:
            return weights[0], biases[0]
        rows = [len(w) for w in weights]
        weight = weights[0].new_empty(sum(rows), weights[0].shape[1], dtype=dtype)
        bias = None if biases[0] is None else weights[0].new_empty(sum(rows), dtype=dtype)
        into = [(t,) if len(rows) == 1 else t.split_with_sizes(rows) for t in (weight, bias) if t is not None]
        self._from += weights if bias is None else group
        self._into += [t for each in zip(*into, strict=True) for t in each]
        return weight, bias


def heads(qkv: torch.Tensor, shape: LayerShape) -> Any:
    """Queries, keys and values of a product, by head."""
    each = [shape.num_heads, shape.num_others, shape.num_others]
    return qkv.view(len(qkv), sum(each), shape.head_size).split_with_sizes(each, 1)


def attend(given: Any, ends: Any, longest: int, shape: LayerShape) -> Any:
    """Output, logsumexp, random state and what else the kernel's backward wants."""
    if ends.device.type == "cpu":
        return _attend_here(given, ends, shape)
    return torch.ops.aten._flash_attention_forward(
        *given, ends, ends, longest, longest, shape.attention_dropout, shape.causal, False, scale=shape.scale,
        **_window(shape),
    )[:4]  # fmt: skip


def attend_backward(grad: Any, given: Any, attended: Any, ends: Any, longest: int, shape: LayerShape) -> Any:
    """Gradients of queries, keys and values."""
    out, logsumexp, state, more = attended
    if ends.device.type == "cpu":
        return _attend_here_backward(grad, given, state, ends, shape)
    return torch.ops.aten._flash_attention_backward(
        grad, *given, out, logsumexp, ends, ends, longest, longest, shape.attention_dropout, shape.causal, state, more,
        scale=shape.scale, **_window(shape),
    )  # fmt: skip


def _window(shape: LayerShape) -> dict[str, int]:
    if shape.window < 0:
        return {}
    return {"window_size_left": shape.window, "window_size_right": 0 if shape.causal else shape.window}


def _attend_here(given: Any, ends: Any, shape: LayerShape) -> Any:
    """On a CPU, sequence by sequence: right, and slow."""
    state = torch.get_rng_state()
    row = PackedHeads(ends, shape.attention_dropout, shape.scale, shape.window, shape.causal)
    query, key, value = (t.transpose(0, 1)[None] for t in given)
    out = attend_one_by_one(query, key, value, row)[0]
    return out, out.new_empty(0), state, out.new_empty(0)


def _attend_here_backward(grad: Any, given: Any, state: Any, ends: Any, shape: LayerShape) -> Any:
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        leaves = [t.detach().contiguous().requires_grad_() for t in given]
        return torch.autograd.grad(_attend_here(leaves, ends, shape)[0], leaves, grad)
