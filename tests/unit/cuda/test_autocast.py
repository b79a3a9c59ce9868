"""Autocast on the meta device: what is cast, what is kept, and for how long."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.cuda.profiles import H200

from vramfit.cuda.dialect import Autocast, Dialect

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def weight(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", requires_grad=True)


class On:
    """The dialect with autocast on, as inside `with torch.autocast("cuda")`."""

    def __init__(self, dtype: torch.dtype = FP16) -> None:
        self.autocast = Autocast(dtype)
        self._dialect = Dialect(H200, self.autocast)

    def __enter__(self) -> Autocast:
        self._before = self.autocast.enter(True)
        self._dialect.__enter__()
        return self.autocast

    def __exit__(self, *error: Any) -> None:
        self._dialect.__exit__(*error)
        self.autocast.leave(self._before)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_products_run_in_the_lower_precision(dtype: torch.dtype) -> None:
    x, w, b = weight(4, 8), weight(16, 8), weight(16)
    with On(dtype):
        assert F.linear(x, w, b).dtype is dtype
        assert torch.matmul(x, w.t()).dtype is dtype
        assert (x @ w.t()).dtype is dtype
        assert torch.einsum("ij,kj->ik", x, w).dtype is dtype


def test_norms_and_losses_run_in_fp32() -> None:
    x = torch.empty(4, 8, dtype=FP16, device="meta")
    with On():
        assert F.layer_norm(x, (8,), weight(8), weight(8)).dtype is FP32
        assert F.mse_loss(x, x).dtype is FP32
        assert x.pow(2).dtype is FP32
        assert torch.exp(x).dtype is FP32


def test_sums_and_softmaxes_of_halves_give_fp32_unless_told_otherwise() -> None:
    x = torch.empty(4, 8, dtype=BF16, device="meta")
    with On(BF16):
        assert x.sum().dtype is FP32
        assert torch.sum(input=x, dim=1).dtype is FP32
        assert F.softmax(x, dim=-1).dtype is FP32
        assert x.sum(dtype=BF16).dtype is BF16


def test_other_operators_keep_their_type() -> None:
    half, full = torch.empty(4, dtype=FP16, device="meta"), torch.empty(4, device="meta")
    with On():
        assert torch.tanh(half).dtype is FP16
        assert (half + full).dtype is FP32
        assert F.gelu(half).dtype is FP16


def test_outside_a_context_nothing_is_cast() -> None:
    with Dialect(H200, Autocast(FP16)):
        assert F.linear(weight(4, 8), weight(16, 8)).dtype is FP32


def test_without_a_lower_precision_a_context_changes_nothing() -> None:
    autocast = Autocast(None)
    before = autocast.enter(True)
    assert not autocast.enabled
    autocast.leave(before)


def test_a_weight_that_learns_is_cast_once_in_a_context() -> None:
    w = weight(8, 8)
    with On() as autocast:
        assert autocast.lower(w) is autocast.lower(w)


def test_frozen_weights_and_activations_are_cast_every_time() -> None:
    frozen = torch.empty(8, 8, device="meta")
    activation = weight(8, 8) * 2
    with On() as autocast:
        for x in (frozen, activation, weight(8, 8)[:4]):
            assert autocast.lower(x) is not autocast.lower(x)


def test_what_is_half_or_whole_or_on_the_host_stays_as_it_is() -> None:
    autocast = Autocast(FP16)
    ids = torch.empty(4, dtype=torch.long, device="meta")
    host, half = torch.zeros(4), torch.empty(4, dtype=BF16, device="meta")
    for value in (ids, host, half, 3, None):
        assert autocast.lower(value) is value


def test_copies_go_when_the_outermost_context_ends() -> None:
    w, autocast = weight(8, 8), Autocast(FP16)
    outer = autocast.enter(True)
    copy = weakref.ref(autocast.lower(w))
    inner = autocast.enter(True)
    autocast.leave(inner)
    gc.collect()
    assert copy() is not None, "an inner context keeps them"
    autocast.leave(outer)
    gc.collect()
    assert copy() is None


def test_a_region_that_switches_it_off_computes_in_fp32_and_switches_it_on_again() -> None:
    x, w = weight(4, 8), weight(16, 8)
    with On() as autocast:
        before = autocast.enter(False)
        assert F.linear(x, w).dtype is FP32
        autocast.leave(before)
        assert F.linear(x, w).dtype is FP16


def test_arguments_are_cast_right_to_left_as_cpp_evaluates_them() -> None:
    order: list[tuple[int, ...]] = []

    class Watched(Autocast):
        def lower(self, value: Any) -> Any:
            order.append(tuple(value.shape))
            return super().lower(value)

    autocast = Watched(FP16)
    autocast.enter(True)
    args, _ = autocast.cast("linear", (weight(4, 8), weight(16, 8), weight(16)), {})
    assert order == [(16,), (16, 8), (4, 8)]
    assert [tuple(a.shape) for a in args] == [(4, 8), (16, 8), (16,)]
    order.clear()
    autocast.cast("einsum", (weight(4, 8), weight(16, 8)), {})
    assert order == [(4, 8), (16, 8)]  # a list of tensors, from its first on
