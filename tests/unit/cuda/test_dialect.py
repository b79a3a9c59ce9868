"""Meta tensors take the ways of CUDA: dropout, softmax, losses and attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.cuda.profiles import A100, H200, K80
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.cuda.dialect import Autocast, Dialect
from vramfit.cuda.kernels.script import CudaProfile
from vramfit.errors import WorkloadError

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


class Seen(TorchDispatchMode):
    """Operators as they reach the device, with the types of what they give; making an input is none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = result if isinstance(result, tuple | list) else [result]
        if func is not torch.ops.aten.empty.memory_format:
            self.calls.append((func._schema.name[6:], [t.dtype for t in given if isinstance(t, torch.Tensor)]))
        return result

    @property
    def operators(self) -> list[str]:
        return [name for name, _ in self.calls]


@contextmanager
def watched(profile: CudaProfile = H200, lower: torch.dtype | None = None) -> Iterator[Seen]:
    autocast = Autocast(lower)
    before = autocast.enter(lower is not None)
    with Seen() as seen, Dialect(profile, autocast):
        yield seen
    autocast.leave(before)


def meta(*shape: int, dtype: torch.dtype = FP32, learns: bool = False) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=learns)


def test_dropout_is_one_kernel_with_a_mask_of_one_byte_an_element() -> None:
    with watched() as seen:
        F.dropout(meta(4, 8, learns=True), 0.1)
    assert seen.calls == [("native_dropout", [FP32, torch.bool])]


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.1, False)])
def test_dropout_that_drops_nothing_gives_back_its_input(p: float, training: bool) -> None:
    x = meta(4, 8)
    with watched() as seen:
        assert F.dropout(x, p, training) is x
    assert seen.calls == []


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax, torch.softmax, torch.log_softmax])
def test_fp16_goes_to_fp32_inside_softmax(function: Any) -> None:
    with watched() as seen:
        assert function(meta(4, 8, dtype=FP16), dim=-1, dtype=FP32).dtype is FP32
    assert [name.strip("_") for name in seen.operators] == [function.__name__]


def test_bf16_is_copied_to_fp32_before_softmax() -> None:
    with watched() as seen:
        assert F.softmax(meta(4, 8, dtype=BF16), dim=-1, dtype=FP32).dtype is FP32
    assert seen.operators == ["_to_copy", "_softmax"]


def test_softmax_in_its_own_type_copies_nothing() -> None:
    with watched() as seen:
        assert meta(4, 8, dtype=BF16).softmax(-1).dtype is BF16
        assert torch.softmax(input=meta(4, 8), dim=-1).dtype is FP32
    assert seen.operators == ["_softmax", "_softmax"]


def test_cross_entropy_under_autocast_stays_low_until_the_loss() -> None:
    logits, target = meta(4, 8, dtype=BF16, learns=True), meta(4, dtype=torch.long)
    with watched(lower=BF16) as seen:
        loss = F.cross_entropy(logits, target)
    types = {name: dtypes[0] for name, dtypes in seen.calls}
    assert types["_log_softmax"] is BF16
    assert types["nll_loss_forward"] is FP32
    assert loss.dtype is FP32


def test_cross_entropy_without_autocast_is_torchs_own() -> None:
    with watched() as seen:
        F.cross_entropy(meta(4, 8), meta(4, dtype=torch.long))
    assert seen.operators == ["_log_softmax", "nll_loss_forward"]


@pytest.mark.parametrize(
    ("profile", "dtype", "operator"),
    [
        (H200, BF16, "_scaled_dot_product_cudnn_attention"),
        (A100, BF16, "_scaled_dot_product_flash_attention"),
        (A100, FP32, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_attention_is_dispatched_as_the_target_would(profile: CudaProfile, dtype: torch.dtype, operator: str) -> None:
    q = meta(2, 4, 16, 64, dtype=dtype)
    with watched(profile) as seen:
        F.scaled_dot_product_attention(q, q, q)
    assert operator in seen.operators


def test_attention_without_a_kernel_makes_the_whole_matrix_of_scores() -> None:
    q = meta(2, 4, 16, 64)
    with watched(K80) as seen:
        F.scaled_dot_product_attention(query=q, key=q, value=q)
    assert "_safe_softmax" in seen.operators
    assert not any("scaled_dot_product" in name for name in seen.operators)


def test_recomputation_inside_backward_hears_the_dialect() -> None:
    x = meta(4, 8, learns=True)

    def layer(y: torch.Tensor) -> torch.Tensor:
        return F.dropout(y * 2, 0.1)

    with watched() as seen:
        loss = torch.utils.checkpoint.checkpoint(
            layer, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        ).sum()
        seen.calls.clear()
        loss.backward()
    assert "native_dropout" in seen.operators
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_bias_whose_rows_are_not_contiguous_leaves_the_scores_to_the_matrix(dtype: torch.dtype) -> None:
    """T5's position biases have the heads last; measured with T5 and Doge on an H200."""
    q, bias = meta(2, 4, 16, 64, dtype=dtype), meta(16, 16, 4, dtype=dtype).permute(2, 0, 1).unsqueeze(0)
    with watched() as seen:
        F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    assert "_safe_softmax" in seen.operators
    with watched() as seen:
        F.scaled_dot_product_attention(q, q, q, attn_mask=bias.contiguous())
    assert "_safe_softmax" not in seen.operators


def test_what_is_written_where_a_tensor_says_must_have_its_type() -> None:
    x, where = meta(4, 8, dtype=FP16), torch.empty(4, dtype=torch.bool, device="meta")
    with watched():
        x[1] = meta(8)  # a slice is converted
        x[where] = 1.0
        with pytest.raises(WorkloadError, match=r"writes torch.float32 into torch.float16"):
            x[where] = meta(2, 8)


def test_a_bias_is_added_in_place_where_rows_do_not_lie_in_order() -> None:
    """Longformer's layers turn sequence and batch around before they multiply."""
    x, w, b = meta(4, 2, 8).transpose(0, 1), meta(16, 8, learns=True), meta(16, learns=True)
    with watched() as seen:
        assert F.linear(x, w, b).shape == (2, 4, 16)
        assert {"add_", "add"} & set(seen.operators) == {"add_"}
        F.linear(x.contiguous(), w, b)
    assert "addmm" in seen.operators


def test_keys_that_are_broadcast_over_all_heads_are_not_repeated() -> None:
    q, key = meta(2, 4, 16, 64, dtype=BF16), meta(2, 1, 16, 64, dtype=BF16)
    with watched() as seen:
        F.scaled_dot_product_attention(q, key, key)
    assert {"_safe_softmax", "repeat_interleave"} & set(seen.operators) == {"_safe_softmax"}
