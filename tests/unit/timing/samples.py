"""A calibration made by hand."""

from typing import Any

from vramfit.records.measurement import Calibration, ProductRate
from vramfit.timing.speed import product_share

RATES = {"float32": 8e12, "tf32": 50e12, "float16": 100e12, "bfloat16": 110e12}


def calibration(**changes: Any) -> Calibration:
    """An A10G whose products reach exactly `RATES` but for tiles and waves."""
    sizes = ((2048, 768, 768), (8192, 3072, 768))
    fields: dict[str, Any] = {
        "gpu": "a10g",
        "reported_name": "NVIDIA A10G",
        "total_memory_bytes": 23_609_475_072,
        "num_multiprocessors": 80,
        "torch_version": "2.11.0+cu130",
        "measured_at": "2026-11-15T12:00:00+00:00",
        "products": tuple(
            ProductRate(dtype=d, m=m, n=n, k=k, flops_per_s=rate * product_share((1, m, n, k), 80))
            for d, rate in RATES.items()
            for m, n, k in sizes
        ),
        "bytes_per_s": 4e11,
        "transfer_bytes_per_s": 12e9,
        "launch_s": 4e-6,
        "forward_operator_s": 8e-6,
        "backward_operator_s": 9e-6,
        "reference_step_s": 0.02,
    }
    return Calibration(**(fields | changes))
