"""Speeds by the catalogue."""

from dataclasses import replace

import pytest

from vramfit.devices.catalogue import all_gpus, find_gpu
from vramfit.timing.speed import Efficiency, HostSpeed, catalogue_speed, link_bytes_per_s


def test_rates_are_shares_of_what_is_published() -> None:
    gpu, reached = find_gpu("h200"), Efficiency()
    speed = catalogue_speed(gpu)
    assert speed is not None
    assert gpu.peak_bf16 is not None
    assert speed.product_flops_per_s["bfloat16"] == gpu.peak_bf16 * reached.tensor_core_product
    assert speed.basis == "catalogue"


def test_a_type_without_tensor_cores_runs_at_the_rate_of_float32() -> None:
    speed = catalogue_speed(find_gpu("p40"))
    assert speed is not None
    assert len(set(speed.product_flops_per_s.values())) == 1


def test_without_published_rates_there_is_no_speed() -> None:
    assert catalogue_speed(replace(find_gpu("t4"), peak_fp32=None)) is None
    assert catalogue_speed(replace(find_gpu("t4"), memory_bandwidth_bytes_per_s=None)) is None


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda g: g.name)
def test_no_type_is_slower_than_float32_on_any_gpu(gpu: object) -> None:
    speed = catalogue_speed(gpu)  # type: ignore[arg-type]
    if speed is not None:
        assert min(speed.product_flops_per_s.values()) == speed.product_flops_per_s["float32"] > 0


def test_a_slower_host_is_slower_in_seconds_and_alike_in_shares() -> None:
    host, slow = HostSpeed(), HostSpeed().scaled(2.0)
    assert slow.operator_s == 2 * host.operator_s
    assert slow.step_s == 2 * host.step_s
    assert (slow.light_share, slow.recompute_share) == (host.light_share, host.recompute_share)


def test_the_link_to_the_host_is_that_of_its_generation() -> None:
    rates = [link_bytes_per_s(find_gpu(name)) for name in ("t4", "a100-40gb", "h200")]
    assert rates == sorted(rates)
    assert len(set(rates)) == 3
