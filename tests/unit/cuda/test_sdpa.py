"""Which attention kernel a GPU takes, and what the call saves for backward."""

import pytest
import torch
from tests.unit.cuda.profiles import A100, H200, K80, T4, V100, profile

from vramfit.cuda.kernels.attention import attention, choose_kernel
from vramfit.cuda.kernels.script import CudaProfile

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def tensor(dtype: torch.dtype, size: int = 64, *, learns: bool = False) -> torch.Tensor:
    return torch.empty(2, 4, 16, size, dtype=dtype, device="meta", requires_grad=learns)


@pytest.mark.parametrize(
    ("gpu", "dtype", "masked", "kernel"),
    [
        (H200, FP16, False, "cudnn"),
        (H200, BF16, True, "cudnn"),
        (H200, FP32, False, "efficient"),
        (H200, FP32, True, "efficient"),
        (A100, FP16, False, "flash"),
        (A100, BF16, False, "flash"),
        (A100, FP16, True, "efficient"),
        (A100, BF16, True, "efficient"),
        (A100, FP32, False, "efficient"),
        (T4, FP16, False, "efficient"),
        (T4, FP16, True, "efficient"),
        (T4, FP32, True, "efficient"),
        (T4, BF16, False, "math"),
        (V100, FP16, False, "efficient"),
        (V100, BF16, True, "math"),
        (K80, FP32, False, "math"),
        (K80, FP16, True, "math"),
    ],
)
def test_each_gpu_takes_its_own_kernel(gpu: CudaProfile, dtype: torch.dtype, masked: bool, kernel: str) -> None:
    q = tensor(dtype)
    bias = torch.empty(2, 1, 16, 16, dtype=dtype, device="meta") if masked else None
    assert choose_kernel(gpu, q, q, q, bias) == kernel


@pytest.mark.parametrize(
    ("gpu", "dtype", "size", "kernel"),
    [
        (H200, FP16, 136, "cudnn"),
        (H200, BF16, 264, "efficient"),
        (profile("b200"), FP16, 136, "flash"),
        (H200, FP16, 60, "flash"),
        (A100, FP16, 264, "efficient"),
        (A100, FP32, 62, "math"),
        (T4, FP16, 36, "math"),
        (T4, FP32, 36, "efficient"),
        (H200, torch.float64, 64, "math"),
    ],
)
def test_odd_head_sizes_and_types_fall_to_the_next_kernel(
    gpu: CudaProfile, dtype: torch.dtype, size: int, kernel: str
) -> None:
    q = tensor(dtype, size)
    assert choose_kernel(gpu, q, q, q) == kernel


def test_flash_needs_values_as_wide_as_queries() -> None:
    assert choose_kernel(A100, tensor(FP16), tensor(FP16), tensor(FP16, 32)) == "efficient"


def test_a_bias_that_learns_is_not_for_cudnn() -> None:
    q, bias = tensor(BF16, learns=True), torch.empty(1, 4, 16, 16, dtype=BF16, device="meta", requires_grad=True)
    assert choose_kernel(H200, q, q, q, bias) == "efficient"
    out = attention(H200, q, q, q, attn_mask=bias)
    out.sum().backward()
    assert bias.grad is not None


@pytest.mark.parametrize(
    ("gpu", "dtype", "kernel"), [(H200, BF16, "cudnn"), (A100, BF16, "flash"), (H200, FP32, "math")]
)
def test_heads_that_share_keys_have_no_efficient_kernel(gpu: CudaProfile, dtype: torch.dtype, kernel: str) -> None:
    q, shared = tensor(dtype, learns=True), tensor(dtype, learns=True)[:, :2]
    assert choose_kernel(gpu, q, shared, shared, enable_gqa=True) == kernel
    assert choose_kernel(gpu, q, shared, shared) == "math"
    out = attention(gpu, q, shared, shared, is_causal=True, enable_gqa=True)
    out.sum().backward()
    assert (out.shape, out.dtype) == (q.shape, q.dtype)


def test_latent_attention_has_wider_queries_than_values() -> None:
    assert choose_kernel(H200, tensor(BF16, 192), tensor(BF16, 192), tensor(BF16, 128)) == "cudnn"
    assert choose_kernel(H200, tensor(BF16, 96), tensor(BF16, 96), tensor(BF16, 264)) == "efficient"


def test_blackwell_goes_with_hopper() -> None:
    q = tensor(BF16)
    assert choose_kernel(profile("b200"), q, q, q) == "cudnn"


@pytest.mark.parametrize("gpu", [H200, A100, T4, K80], ids=["cudnn", "flash", "efficient", "math"])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["half", "full"])
def test_every_kernel_gives_the_shape_and_type_of_its_query(gpu: CudaProfile, dtype: torch.dtype) -> None:
    q = tensor(dtype, learns=True)
    out = attention(gpu, q, q, q, dropout_p=0.1)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert out.requires_grad


def test_the_kernel_taken_is_the_one_autograd_will_walk_back() -> None:
    q, mask = tensor(FP16, learns=True), torch.ones(2, 1, 16, 16, dtype=torch.bool, device="meta")
    names = {
        gpu: type(attention(p, q, q, q, attn_mask=mask).grad_fn).__name__ for gpu, p in (("h200", H200), ("a100", A100))
    }
    assert "Cudnn" in names["h200"]
    assert "Efficient" in names["a100"]


def test_the_math_kernel_computes_half_inputs_in_fp32() -> None:
    seen: list[torch.dtype] = []
    q = tensor(FP16, learns=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.dtype), t)[1], lambda t: t):
        attention(K80, q, q, q)
    assert FP32 in seen


def test_a_bias_of_odd_length_is_padded_for_the_efficient_kernel() -> None:
    q = torch.empty(2, 4, 13, 64, dtype=FP32, device="meta", requires_grad=True)
    saved: list[torch.Tensor] = []
    mask = torch.ones(2, 1, 13, 13, dtype=torch.bool, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        attention(T4, q, q, q, attn_mask=mask)
    (bias,) = [t for t in saved if t.shape == (2, 4, 13, 13)]
    assert bias.untyped_storage().nbytes() == 2 * 13 * 16 * 4
