"""`Tally`: the most that each phase took, read at its ends and in between, and a thinned series of samples."""

import time
from dataclasses import dataclass, replace

from vramfit.monitor.sources import Reading
from vramfit.records.watch import MemorySample, PhaseUse, WatchPhase

MAX_SAMPLES = 2_000
_FIGURES = ("requested_bytes", "allocated_bytes", "reserved_bytes")


@dataclass(slots=True)
class _Use:
    num_times: int = 0
    time_s: float = 0.0
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    def raise_to(self, name: str, value: int | None) -> None:
        known = getattr(self, name)
        if value is not None and (known is None or value > known):
            setattr(self, name, value)


class Tally:
    """Peaks by phase.

    An allocator's own peaks count from whenever they were reset last. A phase that raised such a peak has reached it;
    one that did not is known by the figures at its ends and at the samples in between, which are a lower bound.
    Where peaks may be reset at every phase, all are exact.
    """

    def __init__(self) -> None:
        self.began_at = time.perf_counter()
        self.samples: list[MemorySample] = []
        self.last = Reading()
        self.peak_process_bytes: int | None = None
        self._uses: dict[WatchPhase, _Use] = {}
        self._entered = Reading()
        self._entered_at = self.began_at
        self._device = ""
        self._every = 1
        self._skipped = 0

    def enter(self, reading: Reading) -> None:
        """A phase begins."""
        self.last = self._entered = reading
        self._entered_at = time.perf_counter()

    def leave(self, phase: WatchPhase, reading: Reading) -> None:
        """A phase ends, with what is held now and the allocator's peaks."""
        use = self._uses.setdefault(phase, _Use())
        use.num_times += 1
        use.time_s += time.perf_counter() - self._entered_at
        self._see(use, reading)

    def see(self, phase: WatchPhase, reading: Reading) -> None:
        """Something in the middle of a phase."""
        self._see(self._uses.setdefault(phase, _Use()), reading)

    def _see(self, use: _Use, reading: Reading) -> None:
        self.last = reading
        for name in _FIGURES:
            use.raise_to(name, getattr(self._entered, name))
            use.raise_to(name, getattr(reading, name))
            before, after = getattr(self._entered, f"peak_{name}"), getattr(reading, f"peak_{name}")
            if after is not None and (before is None or after > before):
                use.raise_to(name, after)

    def sample(self, sample: MemorySample, device: str) -> None:
        """Keep a sample; when there are too many, every other one goes.

        A program that begins to use the GPU is charged by another: what its process held before is forgotten.
        """
        if device != self._device:
            self._device, self.peak_process_bytes = device, None
            self.samples = [replace(s, process_bytes=None) for s in self.samples]
        held = sample.process_bytes
        if held is not None:
            self.peak_process_bytes = max(held, self.peak_process_bytes or 0)
        self._skipped += 1
        if self._skipped >= self._every:
            self._skipped = 0
            self.samples.append(sample)
        if len(self.samples) > MAX_SAMPLES:
            self.samples = self.samples[::2]
            self._every *= 2

    def phases(self) -> dict[str, PhaseUse]:
        """What each phase took at the most."""
        return {
            phase: PhaseUse(
                num_times=use.num_times,
                time_s=use.time_s,
                peak_requested_bytes=use.requested_bytes,
                peak_allocated_bytes=use.allocated_bytes,
                peak_reserved_bytes=use.reserved_bytes,
            )
            for phase, use in list(self._uses.items())
        }

    def peak(self, name: str) -> int | None:
        """The most of all phases, of one figure."""
        seen = [getattr(use, name) for use in list(self._uses.values())]
        return max((value for value in seen if value is not None), default=None)
