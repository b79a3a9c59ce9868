"""Runs that leave the numbers end with advice."""

import math

import pytest
import torch

from vramfit.runtime.training.progress import MAX_SKIPPED, Diverged, Divergence


def test_a_loss_that_is_no_number_ends_a_run_without_a_scaler() -> None:
    watch = Divergence(scales=False)
    assert watch.see(1, 0.5, skipped=False) is None
    error = watch.see(2, math.nan, skipped=False)
    assert error is not None
    assert "learning rate" in str(error.hint)
    assert watch.num_nonfinite == 1


def test_fp16_may_skip_but_not_forever() -> None:
    watch = Divergence(scales=True)
    for step in range(MAX_SKIPPED - 1):
        assert watch.see(step, math.inf, skipped=True) is None
    assert watch.see(100, 0.5, skipped=False) is None
    errors = [watch.see(step, math.inf, skipped=True) for step in range(MAX_SKIPPED)]
    assert errors[:-1] == [None] * (MAX_SKIPPED - 1)
    assert "amp-bf16" in str(errors[-1].hint)  # type: ignore[union-attr]


def test_weights_that_are_not_finite_reach_no_checkpoint() -> None:
    with pytest.raises(Diverged, match="no longer finite"):
        Divergence(scales=False).check_weights(3, [torch.nn.Parameter(torch.tensor([1.0, math.inf]))])
