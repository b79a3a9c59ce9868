"""Receipts made of what was run, and checked against the catalogue and against what this vramfit predicts."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from vramfit import __version__
from vramfit.devices.catalogue import find_gpu, match_gpu
from vramfit.errors import UnknownGPU, VramfitError
from vramfit.models.catalogue import find_entry
from vramfit.records.estimate import Estimate
from vramfit.records.measurement import Measurement
from vramfit.records.plan import Plan
from vramfit.records.receipt import DIGEST, Receipt, ReceiptFigures
from vramfit.records.run import RunRecord
from vramfit.settings import SETTINGS
from vramfit.workload import Workload

PRIVATE = ("model", "gpu", "torch_version", "lengths")
"""Settings that a receipt leaves out, or says in fields of its own; lengths are of the user's data."""
UNSTABLE = ("_name_or_path", "transformers_version", "architectures", "id2label", "label2id", "dtype", "torch_dtype")
"""Keys of a configuration that say nothing about its shape, or too much about its owner."""
EMULATED = "emulated"


def public_name(model: str, task: str) -> str:
    """The catalogue's name of a model, or a digest of its configuration."""
    entry = find_entry(model)
    if entry is not None:
        return entry.name
    from vramfit.models.resolve import resolve

    config = resolve(model, task=task).config
    shape = {key: value for key, value in config.to_dict().items() if key not in UNSTABLE} if config else {}
    return DIGEST + hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()


def public_settings(workload: Workload) -> dict[str, Any]:
    """The settings of a workload that were not left alone, without what is private."""
    own = {f.name: getattr(workload, f.name) for f in fields(workload) if f.name not in PRIVATE}
    return {name: value for name, value in own.items() if value != SETTINGS[name].default}


def receipt_of_measurement(predicted: Estimate, measured: Measurement) -> Receipt:
    """The receipt of `vramfit measure`."""
    m, phases = measured, list(measured.phases.values())
    if not phases:
        raise VramfitError("no receipt: memory ran out before the model was on the GPU, so nothing was measured")
    return Receipt(
        kind="measure",
        is_emulated=False,
        date=_today(),
        vramfit_version=__version__,
        torch_version=m.torch_version,
        transformers_version=m.transformers_version,
        driver_version=m.driver_version,
        gpu=m.gpu,
        compute_capability=m.compute_capability,
        total_memory_bytes=m.total_memory_bytes,
        model=public_name(m.workload.model, m.workload.task),
        settings=public_settings(m.workload),
        predicted_gpu=predicted.gpu,
        basis=predicted.basis,
        predicted=_figures_of(predicted, predicted.step_time_s),
        predicted_fits=predicted.fits,
        promised_bytes=predicted.safe_reserved_bytes,
        measured=ReceiptFigures(
            requested_bytes=max(p.peak_requested_bytes for p in phases),
            allocated_bytes=max(p.peak_allocated_bytes for p in phases),
            reserved_bytes=max(p.peak_reserved_bytes for p in phases),
            step_time_s=m.step_time_s,
        ),
        ran_out=m.out_of_memory is not None,
        num_retries=m.num_retries,
        context_bytes=m.context_bytes,
    )


def receipt_of_run(record: RunRecord, plan: Plan) -> Receipt:
    """The receipt of `vramfit train`.

    Raises:
        VramfitError: the run had no allocator to ask: it was on the CPU.
    """
    if record.measured_reserved_bytes is None or record.measured_allocated_bytes is None:
        raise VramfitError("no receipt: this run was on the CPU, where nothing counts what is reserved")
    is_emulated = record.device == EMULATED
    return Receipt(
        kind="train",
        is_emulated=is_emulated,
        date=_today(),
        vramfit_version=__version__,
        torch_version=version("torch"),
        transformers_version=version("transformers"),
        model=public_name(record.model, record.task),
        settings=public_settings(plan.workload),
        predicted_gpu=plan.estimate.gpu,
        basis=plan.estimate.basis,
        predicted=_figures_of(plan.estimate, None if is_emulated else plan.step_time_s),
        predicted_fits=plan.estimate.fits,
        promised_bytes=record.most_reserved_bytes,
        measured=ReceiptFigures(
            allocated_bytes=record.measured_allocated_bytes,
            reserved_bytes=record.measured_reserved_bytes,
            step_time_s=None if record.changes else record.step_time_s,  # steps of several plans
        ),
        ran_out=record.num_recoveries > 0,
        num_retries=record.num_retries or 0,
        context_bytes=None,
        **_card_of(record, plan),
    )


def _figures_of(e: Estimate, step_time_s: float | None) -> ReceiptFigures:
    return ReceiptFigures(
        requested_bytes=e.peak_requested_bytes,
        allocated_bytes=e.peak_allocated_bytes,
        reserved_bytes=e.peak_reserved_bytes,
        step_time_s=step_time_s,
    )


def _card_of(record: RunRecord, plan: Plan) -> dict[str, Any]:
    """The fields of a receipt that say what a run ran on."""
    if record.device == EMULATED:
        return {
            "driver_version": None,
            "gpu": EMULATED,
            "compute_capability": None,
            "total_memory_bytes": plan.budget_bytes,
        }
    import torch

    from vramfit.monitor.sources import present_gpu

    device = torch.device(record.device)
    properties, present = torch.cuda.get_device_properties(device), present_gpu(device)
    return {
        "driver_version": present.driver_version if present else None,
        "gpu": properties.name,
        "compute_capability": (properties.major, properties.minor),
        "total_memory_bytes": properties.total_memory,
    }


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def card_problems(receipt: Receipt) -> Iterator[str]:
    """Why a receipt cannot be of the card it names, by the catalogue."""
    if receipt.is_emulated:
        yield "it is of the emulated GPU, which proves nothing about a card"
        return
    known = match_gpu(receipt.gpu, receipt.total_memory_bytes)
    if known is None:
        yield f"the catalogue has no {receipt.gpu} with {receipt.total_memory_bytes:,} B of memory"
        return
    if receipt.compute_capability != known.compute_capability:
        yield f"{known.name} is {known.sm}, and the receipt says {receipt.compute_capability}"
    try:
        predicted = find_gpu(receipt.predicted_gpu or "")
    except UnknownGPU:
        yield f"it was predicted for {receipt.predicted_gpu!r}, which is not in the catalogue"
        return
    if predicted.compute_capability != known.compute_capability:
        yield f"it was predicted for {predicted.name}, and ran on {known.name}"


def repeat_prediction(receipt: Receipt) -> tuple[str, bool]:
    """What this vramfit predicts for the job of a receipt, in words, and whether the receipt can be what it says.

    A receipt of this very vramfit and transformers must have this prediction; another version may have had another.
    """
    if receipt.model.startswith(DIGEST):
        return "not repeated: only a digest of the model's configuration is known", True
    keywords = {**receipt.settings, "gpu": receipt.predicted_gpu, "torch_version": receipt.torch_version}
    try:
        from vramfit.estimator.predict import estimate

        made = estimate(receipt.model, **{name: value for name, value in keywords.items() if value is not None})
    except VramfitError as error:
        return f"not repeated: {error}", True
    now, then = _figures_of(made, None), receipt.predicted
    if (now.requested_bytes, now.allocated_bytes) == (then.requested_bytes, then.allocated_bytes):
        return "repeated to the byte", True
    off = f"this vramfit predicts {now.allocated_bytes:,} B allocated, and the receipt says {then.allocated_bytes:,} B"
    with_what = (receipt.vramfit_version, receipt.transformers_version)
    if with_what == (__version__, version("transformers")):
        return f"{off}, though it names the same vramfit and transformers", False
    return f"marked: {off}, by vramfit {with_what[0]} with transformers {with_what[1]}", True
