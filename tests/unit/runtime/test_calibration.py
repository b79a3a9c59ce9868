"""What a calibration measures, on the CPU and with a clock that says what it is told."""

import math
from collections.abc import Iterator

import pytest
import torch

from vramfit.runtime import calibration
from vramfit.runtime.calibration import (
    Bench,
    calibrate,
    launch_seconds,
    operator_seconds,
    product_rates,
    stream_rate,
    transfer_rate,
)
from vramfit.runtime.measurement import MeasurementError

CPU = torch.device("cpu")


class Clock:
    """Moves on by so much each time it is read."""

    def __init__(self, tick: float) -> None:
        self._times: Iterator[float] = (tick * i for i in range(10**9))

    def __call__(self) -> float:
        return next(self._times)


def bench(tick: float = 1.0) -> Bench:
    return Bench(CPU, lambda: None, Clock(tick))


def test_a_long_action_is_repeated_three_times() -> None:
    runs: list[int] = []
    assert bench(tick=9.0).seconds(lambda: runs.append(1)) == pytest.approx(3.0)
    assert len(runs) == 1 + 1 + 3


def test_a_short_action_is_repeated_often() -> None:
    runs: list[int] = []
    bench(tick=1e-3).seconds(lambda: runs.append(1))
    assert len(runs) == 1 + 1 + 150


def test_host_time_ends_when_the_program_goes_on() -> None:
    order: list[str] = []
    timed = Bench(CPU, lambda: order.append("wait"), Clock(1.0))
    assert timed.host_seconds(lambda: order.append("run")) == 1.0
    assert order == ["run", *["wait", "run"] * 5, "wait"]


def test_rates_of_products_are_operations_over_seconds() -> None:
    found = list(product_rates(bench(tick=3.0), ["float32", "tf32"], ((8, 4, 2),)))
    assert [(r.dtype, r.m, r.n, r.k) for r in found] == [("float32", 8, 4, 2), ("tf32", 8, 4, 2)]
    assert [r.flops_per_s for r in found] == [2 * 8 * 4 * 2] * 2  # 3 s for three runs


def test_measuring_tf32_leaves_the_setting_as_it_was() -> None:
    before = torch.get_float32_matmul_precision()
    list(product_rates(bench(), ["tf32"], ((2, 2, 2),)))
    assert torch.get_float32_matmul_precision() == before


def test_bandwidth_counts_what_kernels_read_and_write() -> None:
    passes = 2 + 3 + 2.25 + 2 + 3 + 1.5 + 1
    assert stream_rate(bench(tick=3.0), 64 * 16, width=16) == pytest.approx(passes * 64 * 16 * 4 / 7)
    assert transfer_rate(bench(tick=3.0), 1000) == 4000


def test_the_host_is_measured_by_the_operator() -> None:
    assert launch_seconds(bench(tick=1.0), 10) == pytest.approx(0.1)
    assert operator_seconds(bench(tick=1.0), 10) == pytest.approx((0.1, 0.0))


def test_a_real_clock_gives_positive_rates() -> None:
    real = Bench(CPU, lambda: None)
    forward_s, backward_s = operator_seconds(real, 50)
    assert forward_s > 0
    assert backward_s >= 0
    assert math.isfinite(forward_s + backward_s)
    rates = list(product_rates(real, ["float32", "bfloat16"], ((32, 32, 32),)))
    assert all(r.flops_per_s > 0 and math.isfinite(r.flops_per_s) for r in rates)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration.torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeasurementError, match="no CUDA device to calibrate") as caught:
        calibrate()
    assert caught.value.exit_code == 1
    assert caught.value.hint
