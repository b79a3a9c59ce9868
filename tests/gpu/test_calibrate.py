"""A calibration of the GPU present: plausible figures, in about a minute."""

import time

import pytest

from vramfit.devices.catalogue import find_gpu
from vramfit.errors import UnknownGPU
from vramfit.estimator.predict import reference_work
from vramfit.runtime.calibration import calibrate
from vramfit.timing.model import calibrated_speed, with_host_factor

pytestmark = pytest.mark.gpu


def test_the_gpu_present_is_measured_in_about_a_minute() -> None:
    began = time.perf_counter()
    made = calibrate()
    assert time.perf_counter() - began < 120
    try:
        gpu = find_gpu(made.gpu)
    except UnknownGPU:
        pytest.skip(f"{made.reported_name} is not in the catalogue")
    made = with_host_factor(made, reference_work(gpu.name))
    speed = calibrated_speed(made)
    assert 0.1 < made.host_factor < 10
    assert gpu.memory_bandwidth_bytes_per_s is not None
    assert 0.3 < made.bytes_per_s / gpu.memory_bandwidth_bytes_per_s < 1.0
    for dtype, peak in (("float32", gpu.peak_fp32), ("float16", gpu.peak_fp16)):
        if peak is not None:
            assert 0.2 < speed.product_flops_per_s[dtype] / peak < 1.3, dtype
