"""Which attention kernel CUDA would take for a call of `scaled_dot_product_attention`, and the call itself."""

from typing import Literal

import torch
import torch.nn.functional as F

from vramfit.cuda.profile import CudaProfile

Kernel = Literal["cudnn", "flash", "efficient", "math"]
HALF = (torch.float16, torch.bfloat16)
MAX_CUDNN_HEAD = 128
MAX_FLASH_HEAD = 256
aten = torch.ops.aten


def choose_kernel(profile: CudaProfile, query: torch.Tensor, value: torch.Tensor, *, masked: bool) -> Kernel:
    """The first eligible kernel in torch's order of preference (sdp_utils.cpp, 2.11)."""
    half = query.dtype in HALF
    size = query.shape[-1]
    same_size = size == value.shape[-1]
    if query.dtype == torch.bfloat16 and not profile.has_bf16:
        return "math"
    if half and profile.prefers_cudnn_attention and size % 8 == 0 and size <= MAX_CUDNN_HEAD:
        return "cudnn"
    if half and profile.has_flash_attention and not masked and size <= MAX_FLASH_HEAD and same_size:
        return "flash"
    alignment = 8 if half else 4  # minimum_gemm_alignment: 16 bytes for tensor cores
    known_type = half or query.dtype == torch.float32
    if profile.has_efficient_attention and known_type and size % alignment == 0:
        return "efficient"
    return "math"


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
    kernel = choose_kernel(profile, query, value, masked=bias is not None)
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
    factor = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    scores = torch.matmul(query * factor, key.transpose(-2, -1) * factor)
    if bias is not None:
        scores = scores.add_(bias)
    weights = torch.softmax(scores, -1)
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    return torch.matmul(weights, value).to(original)
