"""`time_step`: the work of a step and a device's speed → seconds.

The host puts kernels in a queue and runs ahead; the device works it off. A stretch of a step is over for the device
when both are through, but the host goes on to the next as soon as it is: a forward that the host limits and a
backward that the device limits overlap as in a real run. Where the program asks for a value, it waits.

Calibration profiles are kept in the user's cache folder, one file a GPU, and used for that GPU from then on.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from vramfit.cache import user_folder
from vramfit.devices.catalogue import GPU
from vramfit.records.codec import RecordError, from_json, replace_file, to_json
from vramfit.records.estimate import COPIES, HOST, HOST_STEP
from vramfit.records.measurement import Calibration
from vramfit.records.stream import Stretch, Work, WorkItem
from vramfit.timing.speed import DeviceSpeed, HostSpeed, catalogue_speed, product_share

STEP_BYTES = 44
"""What a step in host memory reads and writes for each weight: fused AdamW 28, the norm and the clipping 12, and the
weight on its way out."""
STREAMED_BYTES, NORM_BYTES = 16, 4
"""What comes to the device for each weight where its step is computed there; as much goes back meanwhile. And what the
host reads for the norm."""
SUM_BYTES = 12
"""The same for a gradient that is added to a sum."""
REPLAY_S = 2e-3
"""What the host spends on a recorded pass: its row is packed, sent, and the graph is started. Not measured alone."""
GROUPS = {"gemm": "matrix products", "attention": "attention", "optimizer": "optimizer", "transfer": COPIES}
"""Kinds of kernels as they are shown; all others read and write tensors and do little else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one steady step."""

    seconds: float
    host_s: float
    """Seconds the host is busy."""
    device_s: dict[str, float]
    """Group of kernels → seconds the device is busy with it."""

    def breakdown(self) -> dict[str, float]:
        """What device and host are busy with; they work side by side, so this adds up to more than the step."""
        return {**self.device_s, HOST: self.host_s}


def step_seconds(work: Work, speed: DeviceSpeed) -> float:
    """Seconds of one steady step."""
    return time_step(work, speed).seconds


def time_step(work: Work, speed: DeviceSpeed, *, replays: bool = False) -> StepTime:
    """Seconds of one steady step, and what they are spent on.

    Args:
        replays: passes were recorded, and the host sends each of them at once.
    """
    learns = any(_learns(stretch) for segment in work.segments for stretch in segment.stretches)
    host_end = device_end = host_s = speed.host.step_s if learns else 0.0
    device_s: dict[str, float] = {}
    for segment in work.segments:
        stretches = [(s.waits, _host(s, speed.host), _device(s, work, speed)) for s in segment.stretches]
        if replays and not any(map(_learns, segment.stretches)):
            stretches = [(False, 0.0 if n else REPLAY_S, kernels) for n, (_, _, kernels) in enumerate(stretches)]
        busy = [(waits, host, _busy(kernels)) for waits, host, kernels in stretches]
        host_end, device_end = _after(busy, host_end, device_end, segment.num_repeats)
        for _, host, kernels in stretches:
            host_s += host * segment.num_repeats
            for group, seconds in kernels.items():
                device_s[group] = device_s.get(group, 0.0) + seconds * segment.num_repeats
    return StepTime(seconds=max(host_end, device_end), host_s=host_s, device_s=device_s)


def _after(
    stretches: list[tuple[bool, float, float]], host_end: float, device_end: float, num_repeats: int
) -> tuple[float, float]:
    """When host and device are through with so many repeats of stretches, by when they began.

    Where the host waits for the device, all repeats but the first are alike. Where it does not, the device is as late
    as its own work makes it, or as the host's first or last repeat does.
    """

    def once(host_end: float, device_end: float) -> tuple[float, float]:
        for waits, host, busy in stretches:
            begin, host_end = host_end, host_end + host
            device_end = max(host_end, max(device_end, begin) + busy)
            host_end = device_end if waits else host_end
        return host_end, device_end

    if num_repeats == 0:
        return host_end, device_end
    if any(waits for waits, _, _ in stretches):
        for _ in range(min(num_repeats, 2)):
            before, (host_end, device_end) = (host_end, device_end), once(host_end, device_end)
        more = max(num_repeats - 2, 0)
        return host_end + more * (host_end - before[0]), device_end + more * (device_end - before[1])
    host_s, busy_s = sum(host for _, host, _ in stretches), sum(busy for _, _, busy in stretches)
    late_s = once(0.0, float("-inf"))[1]
    by_host = host_end + late_s + (num_repeats - 1) * max(host_s, busy_s)
    return host_end + num_repeats * host_s, max(device_end + num_repeats * busy_s, by_host)


def with_host_step(
    step: StepTime, num_weights: int, num_passes: int, speed: DeviceSpeed, *, streams: bool = False
) -> StepTime:
    """The time of a step whose optimizer is in host memory.

    Gradients of later passes are added there while the device goes on; the step comes when all of them are there.

    Args:
        streams: it is computed on the device, to which everything comes piece by piece.
    """
    sums_s = num_weights * SUM_BYTES * (num_passes - 1) / speed.host_bytes_per_s
    if streams:
        streamed_s = num_weights * STREAMED_BYTES / speed.transfer_bytes_per_s
        step_s = streamed_s + num_weights * NORM_BYTES / speed.host_bytes_per_s
    else:
        step_s = num_weights * STEP_BYTES / speed.host_bytes_per_s
    return StepTime(
        seconds=max(step.seconds, sums_s) + step_s,
        host_s=step.host_s,
        device_s={**step.device_s, HOST_STEP: sums_s + step_s},
    )


def _busy(kernels: dict[str, float]) -> float:
    """Copies from and to the host overlap with kernels: they have an engine of their own."""
    copies = kernels.get(COPIES, 0.0)
    return max(copies, sum(kernels.values()) - copies)


def host_seconds(item: WorkItem, host: HostSpeed) -> float:
    """Seconds of the host for one call."""
    if item.num_tensors > 1:
        return host.operator_s * host.light_share + item.num_tensors * host.tensor_s
    share = host.recompute_share if item.phase == "recompute" else 1.0
    if item.phase in ("optimizer", "compiled") or not item.num_launches:
        share *= host.light_share
    return host.operator_s * share


def kernel_seconds(item: WorkItem, speed: DeviceSpeed, *, tf32: bool = False) -> float:
    """Seconds of the device for one call: arithmetic, bytes or the shortest kernel, whichever takes longest."""
    rate = speed.transfer_bytes_per_s if item.kind == "transfer" else speed.bytes_per_s
    seconds = max(item.num_bytes / rate, item.num_launches * speed.min_kernel_s)
    if not item.flops:
        return seconds
    rates = speed.product_flops_per_s
    if item.product is None:  # fused attention in fp32 does not heed TF32: 25 TFLOP/s on an H200, allowed or not
        return max(seconds, item.flops / (rates.get(item.dtype, rates["float32"]) * speed.attention_share))
    dtype = "tf32" if tf32 and item.dtype == "float32" else item.dtype
    flops_per_s = rates.get(dtype, rates["float32"]) * product_share(item.product, speed.num_multiprocessors)
    return max(seconds, item.flops / flops_per_s)


def _learns(stretch: Stretch) -> bool:
    return any(item.phase == "optimizer" for item in stretch.items)


def _host(stretch: Stretch, host: HostSpeed) -> float:
    return sum(item.num_calls * host_seconds(item, host) for item in stretch.items)


def _device(stretch: Stretch, work: Work, speed: DeviceSpeed) -> dict[str, float]:
    """Group of kernels → seconds."""
    kernels: dict[str, float] = {}
    for item in stretch.items:
        if item.num_launches:
            group = "optimizer" if item.phase == "optimizer" else GROUPS.get(item.kind, "elementwise")
            seconds = item.num_calls * kernel_seconds(item, speed, tf32=work.tf32)
            kernels[group] = kernels.get(group, 0.0) + seconds
    return kernels


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
