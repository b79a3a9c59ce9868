"""`Gauge`: what a stretch of code takes, on the device and in the process's own memory."""

from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


class Gauge:
    """Reads memory from its making on; `sample` where the host's use may be highest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._allocated_before = 0
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._allocated_before = torch.cuda.memory_allocated(self._device)
        self._anonymous_before = anonymous_bytes()
        self._anonymous_peak = self._anonymous_before

    def sample(self) -> None:
        """Look at the host's memory now."""
        now = anonymous_bytes()
        if now is not None and self._anonymous_peak is not None:
            self._anonymous_peak = max(self._anonymous_peak, now)

    @property
    def peak_device_bytes(self) -> int | None:
        """The most that was allocated on the GPU beyond what was there before."""
        if self._device is None:
            return None
        return torch.cuda.max_memory_allocated(self._device) - self._allocated_before

    @property
    def device_bytes(self) -> int | None:
        """What is allocated on the GPU now beyond what was there before."""
        if self._device is None:
            return None
        return torch.cuda.memory_allocated(self._device) - self._allocated_before

    @property
    def host_anonymous_bytes(self) -> int | None:
        """The most that the process's own memory had grown, where it was sampled."""
        if self._anonymous_peak is None or self._anonymous_before is None:
            return None
        return self._anonymous_peak - self._anonymous_before


def anonymous_bytes() -> int | None:
    """Resident memory that no file backs; None where the system does not say."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), None)
