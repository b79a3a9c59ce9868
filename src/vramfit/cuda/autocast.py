"""Autocast for tensors that live nowhere: torch refuses it on the meta device, so its rules stand here.

aten/src/ATen/autocast_mode.h (2.11): the operator lists, and cached_cast.
"""

from collections.abc import Callable
from typing import Any

import torch

HALF = (torch.float16, torch.bfloat16)

LOWER = frozenset(
    [
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "addmm",
        "addmv",
        "addr",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "mv",
        "linear",
        "bmm",
        "baddbmm",
        "addbmm",
        "chain_matmul",
        "multi_dot",
        "prelu",
        "einsum",
        "scaled_dot_product_attention",
    ]
)
"""Operators that run in the lower precision. einsum is not in torch's list, but everything it calls is."""

UPPER = frozenset(
    [
        "__rpow__",
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "pow",
        "__pow__",
        "softplus",
        "layer_norm",
        "native_layer_norm",
        "group_norm",
        "frobenius_norm",
        "nuclear_norm",
        "norm",
        "cosine_similarity",
        "poisson_nll_loss",
        "cosine_embedding_loss",
        "nll_loss",
        "nll_loss_nd",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "mse_loss",
        "margin_ranking_loss",
        "multilabel_margin_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
        "multi_margin_loss",
        "binary_cross_entropy_with_logits",
        "dist",
        "pdist",
        "cdist",
        "renorm",
        "logsumexp",
    ]
)
"""Operators that run in fp32."""

UPPER_DTYPE = frozenset(["prod", "cumprod", "cumsum", "sum", "softmax", "log_softmax", "vector_norm", "matrix_norm"])
"""Operators that get `dtype=float32` unless the caller says one."""

CAST = LOWER | UPPER | UPPER_DTYPE
"""Operators whose arguments autocast may change."""


class Autocast:
    """The state of autocast: whether it is on, the lower precision, and the copies of weights it keeps, if it does."""

    def __init__(self, dtype: torch.dtype | None, *, keeps_copies: bool = True) -> None:
        self.dtype = dtype
        self._keeps_copies = keeps_copies
        self.enabled = False
        self._depth = 0
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def enter(self, enabled: bool) -> bool:
        """Begin a context; gives the state to restore."""
        before = self.enabled
        self.enabled = enabled and self.dtype is not None
        self._depth += 1
        return before

    def leave(self, before: bool) -> None:
        """End a context; the outermost drops the copies."""
        self.enabled = before
        self._depth -= 1
        if self._depth == 0:
            self._copies.clear()

    def lower(self, value: Any) -> Any:
        """A tensor in the lower precision; leaves that learn are cast once a context."""
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or value.device.type != "meta":
            return value
        if not (self._keeps_copies and value.is_leaf and value.requires_grad and value._base is None):
            return value.to(self.dtype)
        kept = self._copies.get(id(value))
        if kept is None:
            kept = self._copies[id(value)] = (value, value.to(self.dtype))
        return kept[1]

    def cast(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as autocast would hand them to this operator."""
        if not self.enabled:
            return args, kwargs
        if name in LOWER:
            return _cast_all(self.lower, args, kwargs)
        if name in UPPER:
            return _cast_all(upper, args, kwargs)
        if name in UPPER_DTYPE and kwargs.get("dtype") is None and _is_half((*args, kwargs.get("input"))[0]):
            return args, {**kwargs, "dtype": torch.float32}
        return args, kwargs


def upper(value: Any) -> Any:
    """A tensor in fp32."""
    return value.float() if _is_half(value) else value


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALF


def _cast_all(
    cast: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Right to left, as C++ evaluates the arguments of the wrapped call (seen in recorded streams)."""
    cast_kwargs = {name: cast(kwargs[name]) for name in reversed(kwargs)}
    return tuple(reversed([cast(value) for value in reversed(args)])), cast_kwargs
