"""The CUDA dialect: a function mode that makes meta tensors go the way CUDA tensors go.

It stands above autograd, where torch itself branches by device: dropout, attention, softmax, autocast. Torch refuses
autocast on the meta device, so its rules stand here (aten/src/ATen/autocast_mode.h, 2.11: the operator lists, and
cached_cast).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from vramfit.cuda.profile import CudaProfile
from vramfit.errors import WorkloadError

Kernel = Literal["cudnn", "flash", "efficient", "math"]
HALF = (torch.float16, torch.bfloat16)
MAX_CUDNN_HEAD = 128
WIDE_CUDNN_HEADS = (192, 128)
"""Sizes of a query's and a value's head that cuDNN takes beside: those of latent attention (DeepSeek)."""
MAX_FLASH_HEAD = 256
aten = torch.ops.aten


def choose_kernel(
    profile: CudaProfile, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    """The first eligible kernel in torch's order of preference (sdp_utils.cpp, 2.11)."""
    half = query.dtype in HALF
    size, value_size = query.shape[-1], value.shape[-1]
    if query.dtype == torch.bfloat16 and not profile.has_bf16:
        return "math"
    if half and profile.prefers_cudnn_attention and _suits_cudnn(size, value_size) and not _learns(bias):
        return "cudnn"
    if half and profile.has_flash_attention and bias is None and size <= MAX_FLASH_HEAD and size == value_size:
        return "flash"
    alignment = 8 if half else 4  # minimum_gemm_alignment: 16 bytes for tensor cores
    known_type = half or query.dtype == torch.float32
    is_grouped = query.shape[1] != key.shape[1]  # of the three kernels, this one has no heads that share keys
    is_aligned = size % alignment == 0 and value_size % alignment == 0
    if profile.has_efficient_attention and known_type and is_aligned and not is_grouped:
        return "efficient"
    return "math"


def _suits_cudnn(size: int, value_size: int) -> bool:
    """check_cudnn_tensor_shapes."""
    fits = max(size, value_size) <= MAX_CUDNN_HEAD or (size, value_size) == WIDE_CUDNN_HEADS
    return fits and size % 8 == 0 and value_size % 8 == 0


def _learns(bias: torch.Tensor | None) -> bool:
    """check_attn_mask_shape: whether gradients are wanted for what is added to the scores."""
    return bias is not None and bias.requires_grad


def attention(
    profile: CudaProfile,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` as CUDA dispatches it, on meta tensors."""
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    bias = _as_bias(attn_mask, query)
    kernel = choose_kernel(profile, query, key, value, bias)
    if kernel == "cudnn":
        if bias is not None:
            bias = bias.expand(query.shape[0], bias.shape[1], query.shape[2], key.shape[2])
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, learns, dropout_p, is_causal, False, scale=scale
        )[0]  # what else it gives is let go of before the bias, as in C++
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if kernel == "efficient":
        if bias is not None:
            bias = _aligned(bias).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, learns, dropout_p, is_causal, scale=scale
        )[0]
    if is_causal:
        square = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        bias = _as_bias(square.tril(), query)
    return _math(query, key, value, bias, dropout_p, scale)


def _as_bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """convert_boolean_attn_mask: 0 where attended, -inf where not; made anew for each call."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), float("-inf"), dtype=query.dtype, device=query.device))


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """pad_bias: rows that do not start at multiples of 8 elements are padded, then sliced back."""
    if all(stride % 8 == 0 for stride in bias.stride()[:-1]):
        return bias
    length = bias.shape[-1]
    return F.pad(bias, (0, 8 - length % 8))[..., :length]


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> torch.Tensor:
    """_scaled_dot_product_attention_math: half inputs are computed in fp32."""
    original = query.dtype
    if original in HALF:
        query, key, value = query.float(), key.float(), value.float()
        bias = bias.float() if bias is not None else None
    if query.shape[-3] != key.shape[-3]:  # pre_process_group_query_attention_input
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    scores = torch.matmul(query * factor, key.transpose(-2, -1) * factor)
    if bias is not None:
        scores = scores.add_(bias)
    weights = aten._safe_softmax(scores, -1)
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    return torch.matmul(weights, value).to(original)


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


Handler = Callable[..., Any]


class Dialect(TorchFunctionMode):
    """CUDA's choices for a target GPU, in place of meta's."""

    def __init__(self, profile: CudaProfile, autocast: Autocast) -> None:
        super().__init__()
        self.profile = profile
        self.autocast = autocast
        self._handlers: dict[Any, Handler] = {
            F.dropout: _dropout,
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
    """python_variable_indexing.cpp (2.11): a number that is written into a tensor of a GPU stays on the host."""
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


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout.cpp (2.11): the fused kernel with a mask of one byte an element, when gradients are on or not."""
    if not training or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]
