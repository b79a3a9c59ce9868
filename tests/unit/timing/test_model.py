"""Host and device side by side: whichever is behind sets the pace."""

import random
from dataclasses import replace
from typing import Any

import pytest

from vramfit.records.stream import Stretch, Work, WorkItem, WorkSegment
from vramfit.timing.model import (
    NORM_BYTES,
    STEP_BYTES,
    STREAMED_BYTES,
    SUM_BYTES,
    host_seconds,
    kernel_seconds,
    step_seconds,
    time_step,
    with_host_step,
)
from vramfit.timing.speed import DeviceSpeed, HostSpeed

SPEED = DeviceSpeed(
    basis="catalogue",
    num_multiprocessors=1,
    product_flops_per_s={"float32": 1e12, "tf32": 4e12, "float16": 8e12, "bfloat16": 8e12},
    bytes_per_s=1e9,
    min_kernel_s=1e-6,
    host=HostSpeed(operator_s=10e-6, light_share=0.5, recompute_share=2.0, tensor_s=1e-6, step_s=1e-3),
)


def item(**changes: Any) -> WorkItem:
    fields = {
        "operator": "add",
        "kind": "elementwise",
        "phase": "forward",
        "num_calls": 1,
        "num_launches": 1,
        "num_bytes": 0,
    }
    return WorkItem(**(fields | changes))


def work(*stretches: Stretch, num_repeats: int = 1, tf32: bool = False) -> Work:
    return Work(segments=(WorkSegment(stretches=stretches, num_repeats=num_repeats),), tf32=tf32)


def stretch(*items: WorkItem, waits: bool = False) -> Stretch:
    return Stretch(items=items, waits=waits)


SLOW_KERNEL = item(num_bytes=1_000_000)  # 1 ms of the device, 10 µs of the host
MANY_SMALL = item(num_calls=100)  # 1 ms of the host, 100 µs of the device


def test_many_small_operators_take_the_hosts_time() -> None:
    assert step_seconds(work(stretch(MANY_SMALL)), SPEED) == pytest.approx(1e-3)


def test_large_kernels_take_the_devices_time() -> None:
    assert step_seconds(work(stretch(SLOW_KERNEL)), SPEED) == pytest.approx(1e-3)


def test_the_host_runs_ahead_while_the_device_is_busy() -> None:
    one = step_seconds(work(stretch(SLOW_KERNEL), stretch(MANY_SMALL)), SPEED)
    assert one == pytest.approx(1.1e-3)  # the small ones are put in the queue meanwhile


def test_a_device_that_is_idle_gains_nothing_from_work_to_come() -> None:
    assert step_seconds(work(stretch(MANY_SMALL), stretch(SLOW_KERNEL)), SPEED) == pytest.approx(2e-3)


def test_asking_for_a_value_makes_the_host_wait() -> None:
    waiting = work(stretch(SLOW_KERNEL, waits=True), stretch(MANY_SMALL))
    assert step_seconds(waiting, SPEED) == pytest.approx(2e-3)


def test_repeats_take_as_often_the_time() -> None:
    once, thrice = (step_seconds(work(stretch(MANY_SMALL), num_repeats=n), SPEED) for n in (1, 3))
    assert thrice == pytest.approx(3 * once)


def test_an_optimizer_adds_its_own_python_once() -> None:
    learning = work(stretch(item(phase="optimizer"), item(phase="optimizer", operator="mul")), stretch(MANY_SMALL))
    assert time_step(learning, SPEED).host_s == pytest.approx(1e-3 + 2 * 5e-6 + 1e-3)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 10e-6),
        ({"phase": "backward"}, 10e-6),
        ({"phase": "recompute"}, 20e-6),
        ({"num_launches": 0, "kind": "none"}, 5e-6),
        ({"num_launches": 0, "kind": "none", "phase": "recompute"}, 10e-6),
        ({"phase": "optimizer"}, 5e-6),
        ({"phase": "optimizer", "num_tensors": 200, "kind": "optimizer"}, 205e-6),
    ],
)
def test_what_an_operator_costs_the_host(changes: dict[str, Any], seconds: float) -> None:
    assert host_seconds(item(**changes), SPEED.host) == pytest.approx(seconds)


def test_a_kernel_takes_the_longest_of_arithmetic_bytes_and_launch() -> None:
    product = item(kind="gemm", flops=2 * 128**3, product=(1, 128, 128, 128), dtype="float32", num_bytes=1000)
    assert kernel_seconds(product, SPEED) == pytest.approx(2 * 128**3 / 1e12)
    assert kernel_seconds(replace(product, num_bytes=10**7), SPEED) == pytest.approx(1e-2)
    assert kernel_seconds(item(num_launches=3), SPEED) == pytest.approx(3e-6)


def test_tf32_and_half_precision_have_rates_of_their_own() -> None:
    product = item(kind="gemm", flops=2 * 1280**3, product=(1, 1280, 1280, 1280), dtype="float32")
    plain = kernel_seconds(product, SPEED)
    assert kernel_seconds(product, SPEED, tf32=True) == pytest.approx(plain / 4)
    assert kernel_seconds(replace(product, dtype="bfloat16"), SPEED, tf32=True) == pytest.approx(plain / 8)
    assert kernel_seconds(replace(product, dtype="int8"), SPEED) == pytest.approx(plain)


def test_attention_has_a_share_of_the_rate_of_products() -> None:
    attention = item(kind="attention", flops=10**9, dtype="float16")
    assert kernel_seconds(attention, SPEED) == pytest.approx(1e9 / (8e12 * SPEED.attention_share))


def test_tf32_does_not_speed_up_fused_attention() -> None:
    attention = item(kind="attention", flops=10**9, dtype="float32")
    assert kernel_seconds(attention, SPEED, tf32=True) == kernel_seconds(attention, SPEED)


def test_what_comes_from_host_memory_goes_over_the_bus() -> None:
    assert kernel_seconds(item(kind="transfer", num_bytes=10**9), SPEED) == pytest.approx(1e9 / 20e9)


def test_the_breakdown_names_groups_of_kernels_and_the_host() -> None:
    found = time_step(
        work(
            stretch(SLOW_KERNEL, item(kind="reduction", num_bytes=1_000_000), item(kind="none", num_launches=0)),
            stretch(item(phase="optimizer", num_bytes=500_000)),
        ),
        SPEED,
    ).breakdown()
    assert found["elementwise"] == pytest.approx(2e-3)
    assert found["optimizer"] == pytest.approx(0.5e-3)
    assert set(found) == {"elementwise", "optimizer", "host"}


def test_copies_go_beside_kernels() -> None:
    kernels = item(num_bytes=10**9)  # a second
    copies = item(kind="transfer", num_bytes=10**10)  # half a second
    both = time_step(work(stretch(kernels, copies)), SPEED)
    assert both.seconds == pytest.approx(step_seconds(work(stretch(kernels)), SPEED), rel=1e-3)
    assert both.device_s["transfers"] == pytest.approx(0.5)


def test_a_step_in_host_memory_comes_after_the_last_gradient_and_sums_beside_the_passes() -> None:
    speed = replace(SPEED, host_bytes_per_s=1e9)
    plain = time_step(work(stretch(item(num_bytes=10**9))), speed)
    one = with_host_step(plain, num_weights=10**7, num_passes=1, speed=speed)
    assert one.seconds == pytest.approx(plain.seconds + 10**7 * STEP_BYTES / 1e9)
    few = with_host_step(plain, num_weights=10**7, num_passes=3, speed=speed)
    assert few.seconds == pytest.approx(one.seconds)  # adding them up hides behind the second that the passes take
    many = with_host_step(plain, num_weights=10**7, num_passes=101, speed=speed)
    assert many.seconds == pytest.approx(10**7 * (100 * SUM_BYTES + STEP_BYTES) / 1e9)
    assert many.breakdown()["step from host memory"] == pytest.approx(many.seconds)


def test_a_streamed_step_takes_as_long_as_its_bytes_take_on_the_link() -> None:
    speed = replace(SPEED, host_bytes_per_s=1e9, transfer_bytes_per_s=2e9)
    plain = time_step(work(stretch(item(num_bytes=10**9))), speed)
    streamed = with_host_step(plain, num_weights=10**7, num_passes=1, speed=speed, streams=True)
    assert streamed.seconds == pytest.approx(plain.seconds + 10**7 * (STREAMED_BYTES / 2e9 + NORM_BYTES / 1e9))


@pytest.mark.parametrize("seed", range(40))
def test_many_repeats_take_what_they_take_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    num_waiting = draw.choice([0, 0, 1])
    stretches = [
        stretch(item(num_calls=draw.randint(1, 40), num_bytes=draw.randint(0, 2_000_000)), waits=n < num_waiting)
        for n in range(draw.randint(1, 4))
    ]
    before = WorkSegment(stretches=(stretch(item(num_bytes=draw.randint(0, 40_000_000))),), num_repeats=1)
    repeated = WorkSegment(stretches=tuple(stretches), num_repeats=draw.randint(1, 12))
    alone = replace(repeated, num_repeats=1)
    together = time_step(Work(segments=(before, repeated), tf32=False), SPEED)
    one_by_one = time_step(Work(segments=(before, *[alone] * repeated.num_repeats), tf32=False), SPEED)
    assert together.seconds == pytest.approx(one_by_one.seconds, rel=1e-9)
    assert together.host_s == pytest.approx(one_by_one.host_s, rel=1e-9)
