"""Calibration profiles: kept in the user's cache folder, one file a GPU, and used for that GPU from then on."""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

from vramfit.cache import user_folder
from vramfit.devices.catalogue import GPU
from vramfit.records.codec import RecordError, from_json, replace_file, to_json
from vramfit.records.measurement import Calibration
from vramfit.records.stream import Work
from vramfit.timing.model import step_seconds
from vramfit.timing.speed import DeviceSpeed, HostSpeed, catalogue_speed, product_share

HOST_FACTORS = (0.05, 50.0)
"""No machine that runs PyTorch is outside."""
FALLBACK = {"tf32": "float32", "float16": "float32", "bfloat16": "float32"}
"""A type that was not measured, since the GPU has it not, runs no faster than this one."""


def profile_folder() -> Path:
    """Where profiles are kept, in the user's cache."""
    return user_folder("calibration")


def profile_path(gpu_name: str) -> Path:
    """The file of a GPU."""
    return profile_folder() / f"{re.sub(r'[^a-z0-9]+', '-', gpu_name.lower()).strip('-')}.json"


def save_profile(calibration: Calibration, path: Path | None = None) -> Path:
    """Keep a calibration; gives the file.

    Raises:
        VramfitError: the place cannot be written.
    """
    path = path or profile_path(calibration.gpu)
    with suppress(OSError):  # `replace_file` says what is wrong with the place
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (to_json(calibration) + "\n").encode())
    return path


def speed_of(gpu: GPU) -> tuple[DeviceSpeed | None, tuple[str, ...]]:
    """The speed of a GPU, by its profile where there is one, else by the catalogue; and what a reader should know."""
    path = profile_path(gpu.name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return catalogue_speed(gpu), ()
    try:
        calibration = from_json(Calibration, text)
        speed = calibrated_speed(calibration)
    except (RecordError, ValueError):
        return catalogue_speed(gpu), (
            f"the calibration profile {path} cannot be read: vramfit calibrate makes it anew",
        )
    note = f"step time: by the calibration of {calibration.reported_name} on {calibration.measured_at[:10]}"
    return speed, (note,)


def calibrated_speed(calibration: Calibration) -> DeviceSpeed:
    """The speed that a calibration found.

    Raises:
        ValueError: a calibration without a product of float32, or with a rate that is not positive.
    """
    rates: dict[str, list[float]] = {}
    for p in calibration.products:
        share = product_share((1, p.m, p.n, p.k), calibration.num_multiprocessors)
        rates.setdefault(p.dtype, []).append(p.flops_per_s / share)
    reached = {dtype: median(found) for dtype, found in rates.items()}
    figures = [*reached.values(), calibration.bytes_per_s, calibration.transfer_bytes_per_s, calibration.host_factor]
    if "float32" not in reached or min(figures) <= 0:
        raise ValueError("a calibration needs products of float32, and rates above zero")
    return DeviceSpeed(
        basis="calibrated",
        num_multiprocessors=calibration.num_multiprocessors,
        product_flops_per_s={dtype: reached[other] for dtype, other in FALLBACK.items()} | reached,
        bytes_per_s=calibration.bytes_per_s,
        transfer_bytes_per_s=calibration.transfer_bytes_per_s,
        host=HostSpeed().scaled(calibration.host_factor),
    )


def with_host_factor(calibration: Calibration, reference: Work) -> Calibration:
    """The calibration with the factor at which the model gives the reference step its measured time.

    Args:
        calibration: what was measured.
        reference: what `records.measurement.REFERENCE` does in a step.
    """
    speed = calibrated_speed(replace(calibration, host_factor=1.0))
    low, high = HOST_FACTORS
    for _ in range(40):
        middle = (low * high) ** 0.5
        slower = replace(speed, host=HostSpeed().scaled(middle))
        if step_seconds(reference, slower) < calibration.reference_step_s:
            low = middle
        else:
            high = middle
    return replace(calibration, host_factor=round((low * high) ** 0.5, 4))
