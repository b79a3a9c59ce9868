"""Attention as CUDA dispatches it: which kernel torch takes, and what it calls around it."""

from typing import Literal

import torch
import torch.nn.functional as F

from vramfit.cuda.profile import CudaProfile

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
