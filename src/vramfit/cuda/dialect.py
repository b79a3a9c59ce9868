"""The CUDA dialect: a function mode that makes meta tensors go the way CUDA tensors go; and `stand_ins`, for the length
of which torch itself, where it asks for the device type, takes meta as it takes cuda.

It stands above autograd, where torch itself branches by device: dropout, attention, softmax, autocast. Torch refuses
autocast on the meta device, so its rules stand here (aten/src/ATen/autocast_mode.h, 2.11: the operator lists, and
cached_cast).
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import torch.utils._foreach_utils
import torch.utils.checkpoint
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from vramfit.cuda.kernels.attention import HALF, attention
from vramfit.cuda.kernels.script import CudaProfile
from vramfit.errors import WorkloadError

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
"""Operators that run in the lower precision."""

LISTED = frozenset(["einsum", "chain_matmul", "multi_dot"])
"""Operators that take their tensors as a list, which is cast from its first on."""

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
        if name in LISTED:
            return tuple(map(self.lower, args)), kwargs
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


Handler = Callable[..., Any]


class Dialect(TorchFunctionMode):
    """CUDA's choices for a target GPU, in place of meta's."""

    def __init__(self, profile: CudaProfile, autocast: Autocast) -> None:
        super().__init__()
        self.profile = profile
        self.autocast = autocast
        self._handlers: dict[Any, Handler] = {
            F.dropout: _dropout,
            F.linear: _linear,
            F.scaled_dot_product_attention: self._attention,
            F.cross_entropy: self._cross_entropy,
            torch.Tensor.backward: self._backward,
            torch.Tensor.__setitem__: _write_number,
            torch.tensor: partial(_from_host, torch.tensor),
            torch.as_tensor: partial(_from_host, torch.as_tensor),
        }
        self._handlers |= {
            f: partial(_fourier, f) for f in vars(torch.fft).values() if getattr(f, "__name__", "").startswith("fft_")
        }
        self._named: dict[str, Handler] = {"softmax": self._softmax, "log_softmax": self._softmax}
        self._same: set[Any] = set()
        """Functions that CUDA has no other way with, `x.shape` among them: most of what is heard."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._same:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self.autocast.enabled:
            args, kwargs = self.autocast.cast(name, args, kwargs)
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        named = self._named.get(name)
        if named is not None:
            return named(name, *args, **kwargs)
        if name not in CAST:
            self._same.add(func)
        return func(*args, **kwargs)

    def _backward(
        self,
        tensor: torch.Tensor,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Recomputation inside backward must hear the dialect too: torch has taken the mode off here."""
        wanted = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ())
        with self:
            gradient = torch.ones_like(tensor, memory_format=torch.preserve_format) if gradient is None else gradient
            keep = create_graph if retain_graph is None else retain_graph
            _engine_run_backward(
                (tensor,), (gradient,), keep, create_graph, wanted, allow_unreachable=True, accumulate_grad=True
            )

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return attention(self.profile, *args, **kwargs)

    def _cross_entropy(self, logits: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Under autocast the log-softmax stays in the lower precision and nll_loss casts to fp32."""
        if not (self.autocast.enabled and logits.dtype in HALF):
            return F.cross_entropy(logits, target, *args, **kwargs)
        dim = 1 if logits.dim() > 1 else 0
        kept = {k: v for k, v in kwargs.items() if k in ("weight", "ignore_index", "reduction")}
        return F.nll_loss(torch.log_softmax(logits, dim, dtype=logits.dtype).float(), target, **kept)

    def _softmax(self, name: str, input: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """SoftMax.cpp (2.11): only fp16 has a kernel from half to float; bf16 is copied to fp32 first."""
        dtype = kwargs.get("dtype", next((a for a in args if isinstance(a, torch.dtype)), None))
        if input.dtype == torch.float16 and dtype == torch.float32:
            return (torch._softmax if name == "softmax" else torch._log_softmax)(input, dim, True)
        function = torch.softmax if name == "softmax" else torch.log_softmax
        return function(input, dim, dtype=None if dtype == input.dtype else dtype)


def _from_host(function: Handler, data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """A tensor of numbers is made on the host and copied: straight to meta, nobody would see it come."""
    made: torch.Tensor = function(data, *args, device=device, **kwargs)
    if isinstance(data, torch.Tensor) or not made.is_meta:
        return made
    return torch.tensor(data, dtype=made.dtype, device="cpu").to("meta").requires_grad_(made.requires_grad)


def _write_number(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """python_variable_indexing.cpp (2.11): a number that is written into a tensor of a GPU stays on the host.

    A GPU refuses values of another type where the index is a tensor; the meta device does not, so this does.
    """
    places = index if isinstance(index, tuple) else (index,)
    is_other = isinstance(value, torch.Tensor) and value.dim() > 0 and value.dtype != tensor.dtype
    if tensor.is_meta and is_other and any(isinstance(place, torch.Tensor) for place in places):
        raise WorkloadError(
            [f"the model's own code writes {value.dtype} into {tensor.dtype}: it does not run in this precision"],
            hint="take precision fp32",
        )
    if tensor.is_meta and isinstance(value, int | float):
        value = torch.tensor(value, dtype=tensor.dtype, device="cpu")
    tensor[index] = value


def _fourier(function: Handler, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """SpectralOps.cpp (2.11), promote_tensor_fft: what a GPU refuses, where the precision of a job is the reason."""
    if input.dtype == torch.bfloat16:
        raise WorkloadError(
            ["torch has no Fourier transforms in bfloat16: the model does not run in this precision"],
            hint="take precision fp32",
        )
    transformed: torch.Tensor = function(input, *args, **kwargs)
    return transformed


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Linear.cpp (2.11): where rows do not lie in order the bias is added in place, but for the presence of a mode."""
    if bias is None or input.dim() < 3 or input.is_contiguous():
        return F.linear(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout.cpp (2.11): the fused kernel with a mask of one byte an element, when gradients are on or not."""
    if not training or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


def autocast_context(autocast: Autocast) -> type:
    """A class that stands for `torch.autocast` and switches the traced autocast."""

    class TracedAutocast:
        def __init__(self, device_type: str = "cuda", dtype: Any = None, enabled: bool = True, **_: Any) -> None:
            self._ignored = device_type == "cpu"
            self._enabled = enabled

        def __enter__(self) -> None:
            if not self._ignored:
                self._before = autocast.enter(self._enabled)

        def __exit__(self, *_: object) -> None:
            if not self._ignored:
                autocast.leave(self._before)

    return TracedAutocast


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers comments on settings of the model that a trace puts together, and nobody asked."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def stand_ins(model: torch.nn.Module, autocast: Autocast, *others: torch.nn.Module) -> Iterator[None]:
    """While it lasts: autocast, checkpointing, foreach and fused kernels work on meta as on CUDA."""
    context = autocast_context(autocast)
    real_is_enabled, real_dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def is_enabled(device_type: str = "cuda") -> bool:
        return autocast.enabled if device_type in ("meta", "cuda") else real_is_enabled(device_type)

    def dtype_of(device_type: str = "cuda") -> torch.dtype:
        found = autocast.dtype if device_type in ("meta", "cuda") else None
        return found or real_dtype_of(device_type)

    def recompute_kwargs(device_type: str = "cuda") -> tuple[dict[str, Any], dict[str, Any]]:
        return {"enabled": autocast.enabled}, {"enabled": False}

    def with_meta() -> list[str]:
        return ["cuda", "meta"]

    # torch.optim deletes the names of its submodules, so they are found by import
    adam, optimizer = (import_module(f"torch.optim.{name}") for name in ("adam", "optimizer"))
    replaced: list[tuple[Any, str, Any]] = [
        (torch, "autocast", context),
        (torch.amp, "autocast", context),
        (torch, "is_autocast_enabled", is_enabled),
        (torch, "get_autocast_dtype", dtype_of),
        (torch.amp, "is_autocast_available", lambda device_type: True),
        (torch.utils.checkpoint, "_get_autocast_kwargs", recompute_kwargs),
        (torch.utils._foreach_utils, "_get_foreach_kernels_supported_devices", with_meta),
        (torch.utils._foreach_utils, "_get_fused_kernels_supported_devices", with_meta),
        (optimizer, "_get_foreach_kernels_supported_devices", with_meta),
        (adam, "_device_dtype_check_for_fused", lambda *_, **__: None),
    ]
    # transformers' own wrapper ignores meta; model files hold it by name
    files = {sys.modules[type(module).__module__] for one in (model, *others) for module in one.modules()}
    replaced += [(file, "maybe_autocast", context) for file in files if hasattr(file, "maybe_autocast")]
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield
