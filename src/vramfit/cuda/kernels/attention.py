"""Attention on CUDA: which kernel torch takes, what it calls around it, and what each asks for beside its outputs."""

from typing import Any, Literal

import torch
import torch.nn.functional as F

from vramfit.cuda.kernels.script import CudaProfile, KernelCall, Script, TensorSpec, ceil_div, kernel

Kernel = Literal["cudnn", "flash", "efficient", "math"]
HALF = (torch.float16, torch.bfloat16)
MAX_CUDNN_HEAD, MAX_HOPPER_HEAD = 128, 256
WIDE_CUDNN_HEADS = (192, 128)
"""Sizes of a query's and a value's head that cuDNN takes beside: those of latent attention (DeepSeek)."""
MAX_FLASH_HEAD = 256
aten = torch.ops.aten
ACCUMULATOR_BYTES = 4
CUDNN_FORWARD_WORKSPACE_BYTES = 256


def choose_kernel(
    profile: CudaProfile,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    enable_gqa: bool = False,
) -> Kernel:
    """The first eligible kernel in torch's order of preference (sdp_utils.cpp, 2.11)."""
    half = query.dtype in HALF
    size, value_size = query.shape[-1], value.shape[-1]
    is_grouped = query.shape[1] != key.shape[1]
    if is_grouped and not enable_gqa:
        return "math"  # check_batch_size_and_num_heads_dense: Falcon's one key is broadcast over all heads
    if query.dtype == torch.bfloat16 and not profile.has_bf16:
        return "math"
    if any(t.stride(-1) != 1 for t in (query, key, value, bias) if t is not None):
        return "math"  # check_last_dim_stride_equals_1_dense: T5's position biases have the heads last
    if half and profile.prefers_cudnn_attention and _suits_cudnn(profile, size, value_size) and not _learns(bias):
        return "cudnn"
    if half and profile.has_flash_attention and bias is None and size <= MAX_FLASH_HEAD and size == value_size:
        return "flash"
    alignment = 8 if half else 4  # minimum_gemm_alignment: 16 bytes for tensor cores
    known_type = half or query.dtype == torch.float32
    is_aligned = size % alignment == 0 and value_size % alignment == 0
    if profile.has_efficient_attention and known_type and is_aligned and not is_grouped:  # no heads that share keys
        return "efficient"
    return "math"


def writes_scores_unmasked(profile: CudaProfile, config: Any, dtype: torch.dtype) -> bool:
    """Whether grouped-query heads make torch write out all attention scores, but only where no mask is given.

    With a mask, transformers repeats the keys that heads share; without one, it leaves that to torch (`enable_gqa`),
    some of whose kernels do not take grouped heads.
    """
    text = config.get_text_config()
    heads, groups = (getattr(text, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    if not heads or not groups or groups == heads:
        return False
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    query, key = (torch.empty(1, n, 1, size, dtype=dtype, device="meta") for n in (heads, groups))
    bias = torch.empty(1, 1, 1, 1, dtype=dtype, device="meta")
    unmasked = choose_kernel(profile, query, key, key, enable_gqa=True)
    return unmasked == "math" and choose_kernel(profile, query, query, query, bias) != "math"


def _suits_cudnn(profile: CudaProfile, size: int, value_size: int) -> bool:
    """check_cudnn_tensor_shapes; wide heads on Hopper since torch 2.9 (pull request 161210)."""
    is_wide = profile.compute_capability == (9, 0) and profile.torch_version >= (2, 9)
    most = MAX_HOPPER_HEAD if is_wide else MAX_CUDNN_HEAD
    fits = max(size, value_size) <= most or (size, value_size) == WIDE_CUDNN_HEADS
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
    kernel = choose_kernel(profile, query, key, value, bias, enable_gqa=enable_gqa)
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
    return _math(query, key, value, bias, dropout_p, scale, enable_gqa)


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
    enable_gqa: bool,
) -> torch.Tensor:
    """_scaled_dot_product_attention_math: half inputs are computed in fp32."""
    original = query.dtype
    if original in HALF:
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa and query.shape[-3] != key.shape[-3]:  # pre_process_group_query_attention_input
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    scaled = query * factor  # a local in C++ too: held, like key and value, until the function returns
    weights = torch.matmul(scaled, key.transpose(-2, -1) * factor)
    if bias is not None:
        weights = weights.add_(bias)
    weights = aten._safe_softmax(weights, -1)
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    returned_too = weights.to(original)  # callers drop it
    result = torch.matmul(weights, value).to(original)
    del returned_too
    return result


@kernel("_scaled_dot_product_cudnn_attention")
def cudnn_forward(call: KernelCall, script: Script) -> None:
    """cudnn/MHA.cpp (2.11): seed and offset on the device, then output, logsumexp and a small workspace."""
    script.out(6)
    script.out(7)
    script.out(0)
    if call.outputs[1] is not None:
        script.out(1)
    script.scratch(CUDNN_FORWARD_WORKSPACE_BYTES)


@kernel("_scaled_dot_product_cudnn_attention_backward")
def cudnn_backward(call: KernelCall, script: Script) -> None:
    """A workspace for dq in fp32 and the row sums (seen on sm_90; cuDNN 9).

    Where heads share keys, gradients of keys and values are made for every head of the queries first (not measured).
    """
    query, key, value = call.args[1:4]
    for index in range(3):
        script.out(index)
    batch, heads, length, size = query.shape
    needed = batch * heads * length * (size + 1) * ACCUMULATOR_BYTES + CUDNN_FORWARD_WORKSPACE_BYTES
    if heads != key.shape[1]:
        needed += batch * heads * key.shape[2] * (size + value.shape[3]) * key.itemsize
    script.scratch(needed)


@kernel("_scaled_dot_product_efficient_attention")
def efficient_forward(call: KernelCall, script: Script) -> None:
    """transformers/cuda/attention.cu (2.11): seed and offset stay on the host."""
    script.out(0)
    logsumexp = call.outputs[1]
    if logsumexp is not None and logsumexp.numel:
        script.out(1)


@kernel("_scaled_dot_product_efficient_attention_backward")
def efficient_backward(call: KernelCall, script: Script) -> None:
    """transformers/cuda/attention_backward.cu (2.11)."""
    grad, query, key, value = call.args[:4]
    batch, heads, num_queries, size = query.shape
    copy = None
    if not _is_row_major(grad):
        copy = script.temp(grad.nbytes)
    for index, output in enumerate(call.outputs):
        if output is not None:
            script.out(index)
    rows = batch * heads * num_queries * ACCUMULATOR_BYTES
    if query.itemsize == 4:
        product = script.temp(rows * value.shape[3])
        total = script.temp(rows)
        delta = script.temp(rows)
        script.free(total, product)
    else:
        delta = script.temp(rows)
    workspace = script.temp(
        batch
        * heads
        * efficient_workspace_bytes(num_queries, key.shape[2], size, value.shape[3], query.itemsize, batch * heads)
    )
    script.free(delta, workspace)
    if copy is not None:
        script.free(copy)


def efficient_workspace_bytes(
    num_queries: int, num_keys: int, size: int, value_size: int, itemsize: int, num_heads: int
) -> int:
    """AttentionBackwardKernel::workspace_elements_gk/gq (kernel_backward.h), bytes for one head."""
    widest = max(size, value_size)
    block_queries, block_keys = (64, 64) if widest <= 64 else (128, 64)
    max_size = next((m for m in (32, 64, 128) if widest <= m), 65536)
    query_elements = ceil_div(num_queries, block_queries) * ceil_div(size, 64) * (16 + block_queries * 64 * 4) // 4
    key_elements = 0
    if itemsize == 2 and max_size > block_queries:  # the accumulators do not stay in registers
        splits = max(1, min(ceil_div(num_keys, block_keys), 200 // num_heads))
        columns = ceil_div(size, block_queries) + ceil_div(value_size, block_queries)
        key_elements = splits * ceil_div(num_keys, block_keys) * block_keys * columns * block_queries
    return ceil_div(query_elements + key_elements, 4) * 4 * ACCUMULATOR_BYTES


@kernel("_scaled_dot_product_flash_attention")
def flash_forward(call: KernelCall, script: Script) -> None:
    """flash_attn/flash_api.cpp (2.11), mha_fwd: output, logsumexp, then the random state when it drops."""
    script.out(0)
    script.out(1)
    for index in (6, 7):
        if len(call.outputs) > index and call.outputs[index] is not None:
            script.out(index)


@kernel("_scaled_dot_product_flash_attention_backward")
def flash_backward(call: KernelCall, script: Script) -> None:
    """flash_attn/flash_api.cpp (2.11), mha_bwd: row sums and dq in fp32, both rounded up to blocks.

    Where heads share keys, gradients of keys and values are made for every head of the queries, and summed.
    """
    query, key = call.args[1:3]
    batch, heads, length, size = query.shape
    rounded_length = ceil_div(length, 128) * 128
    rounded_size = ceil_div(size, 32) * 32 if size <= 128 else ceil_div(size, 64) * 64
    for index in range(3):
        script.out(index)
    rows = batch * heads * rounded_length * ACCUMULATOR_BYTES
    row_sums = script.temp(rows)
    sums = script.temp(rows * rounded_size)
    if heads != key.shape[1]:
        expanded = batch * key.shape[2] * heads * size * key.itemsize
        script.free(script.temp(expanded), script.temp(expanded))
    script.free(sums, row_sums)


@kernel("_flash_attention_forward")
def packed_forward(call: KernelCall, script: Script) -> None:
    """flash_attn/flash_api.cpp (2.11), mha_varlen_fwd: output, logsumexp, random state."""
    for index in range(4):
        script.out(index)


@kernel("_flash_attention_backward")
def packed_backward(call: KernelCall, script: Script) -> None:
    """flash_attn/flash_api.cpp (2.11), mha_varlen_bwd: row sums and dq in fp32, a block of rows more a sequence."""
    query: TensorSpec = call.args[1]
    num_tokens, heads, size = query.shape
    num_sequences = call.args[6].shape[0] - 1
    rounded_size = ceil_div(size, 32) * 32 if size <= 128 else ceil_div(size, 64) * 64
    for index in range(3):
        script.out(index)
    rows = (num_tokens + 128 * num_sequences) * heads * ACCUMULATOR_BYTES
    held = [script.temp(rows), script.temp(rows * rounded_size)]
    key: TensorSpec = call.args[2]
    if key.shape[1] != heads:  # gradients of keys and values for every head of queries, then summed over their group
        held += [script.temp(key.shape[0] * heads * size * key.itemsize) for _ in range(2)]
    script.free(*reversed(held))


@kernel("_safe_softmax")
def safe_softmax(call: KernelCall, script: Script) -> None:
    """native/transformers/attention.cpp (2.11): the softmax, where its input is -inf, and in which rows all of it.

    The result is written over the softmax; releases before 2.11 are taken to make another one, as 2.5 did.
    """
    x: TensorSpec = call.args[0]
    makes_another = call.profile.torch_version < (2, 11)
    softmax = [script.temp(x.nbytes), script.temp(x.itemsize)] if makes_another else []  # and a scalar: -inf
    if not makes_another:
        script.out()
    hidden, rows, zero = script.temp(x.numel), script.temp(x.numel // x.shape[-1]), script.temp(x.itemsize)
    if makes_another:
        script.out()
    script.free(zero, rows, hidden, *reversed(softmax))


def _is_row_major(x: TensorSpec) -> bool:
    """Whether [batch, heads, rows, size] lies in memory as [batch, rows, heads, size]."""
    batch, heads, rows, size = range(4)
    order = (batch, rows, heads, size)
    return TensorSpec(
        tuple(x.shape[d] for d in order), tuple(x.stride[d] for d in order), x.dtype, x.itemsize
    ).is_contiguous
