"""Receipts and measurements of a T4 that nobody made."""

from dataclasses import replace
from typing import Any

from vramfit.devices.catalogue import find_gpu
from vramfit.records.estimate import Estimate
from vramfit.records.measurement import Measurement, PhaseMeasurement
from vramfit.records.receipt import Receipt, ReceiptFigures, digest_of

KEYWORDS: dict[str, Any] = {"batch": 4, "seq": 16, "precision": "amp-fp16"}
MIB = 2**20


def receipt(**changes: Any) -> Receipt:
    """A receipt of a T4 whose prediction was right."""
    figures = ReceiptFigures(requested_bytes=90 * MIB, allocated_bytes=100 * MIB, reserved_bytes=120 * MIB)
    given = {
        "kind": "measure",
        "is_emulated": False,
        "date": "2026-11-18",
        "vramfit_version": "0.1.0",
        "torch_version": "2.11.0+cu128",
        "transformers_version": "5.22.2",
        "driver_version": "580.95.05",
        "gpu": "Tesla T4",
        "compute_capability": (7, 5),
        "total_memory_bytes": 15_636_365_312,
        "model": "bert-tiny",
        "settings": {"batch": 8, "seq": 128},
        "predicted_gpu": "t4",
        "basis": "derived",
        "predicted": figures,
        "predicted_fits": True,
        "promised_bytes": 124 * MIB,
        "measured": figures,
        "ran_out": False,
        "num_retries": 0,
        "context_bytes": 135 * MIB,
    }
    made = Receipt(**(given | changes))  # type: ignore[arg-type]
    return replace(made, digest=digest_of(made))


def peaks(allocated: int, reserved: int, requested: int | None = None) -> ReceiptFigures:
    return ReceiptFigures(requested_bytes=requested, allocated_bytes=allocated * MIB, reserved_bytes=reserved * MIB)


def measured_as(e: Estimate, *, more: float = 1.0, **changes: Any) -> Measurement:
    """What a T4 would say that takes so many times what was predicted."""
    phases = {
        name: PhaseMeasurement(
            peak_requested_bytes=int(more * p.peak_requested_bytes),
            peak_allocated_bytes=int(more * p.peak_allocated_bytes),
            peak_reserved_bytes=int(more * p.peak_reserved_bytes),
        )
        for name, p in e.phases.items()
    }
    given = {
        "workload": replace(e.workload, gpu=None),
        "gpu": "Tesla T4",
        "compute_capability": (7, 5),
        "total_memory_bytes": find_gpu("t4").total_memory_bytes,
        "torch_version": "2.13.0+cu128",
        "transformers_version": "5.22.2",
        "driver_version": "580.95.05",
        "phases": phases,
        "steps": (),
        "step_times_s": (1.0, 0.25, 0.25),
        "num_retries": 0,
        "num_ooms": 0,
        "reserved_bytes": 100,
        "process_bytes": 300,
        "out_of_memory": None,
    }
    return Measurement(**(given | changes))  # type: ignore[arg-type]
