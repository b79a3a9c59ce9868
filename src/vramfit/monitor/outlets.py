"""Where samples go beside the record: JSON lines, and a text file for Prometheus."""

import json
import threading
from pathlib import Path
from typing import IO, Any, Protocol

from vramfit.records.codec import cannot_write, replace_file, to_data
from vramfit.records.estimate import FIGURES
from vramfit.records.watch import MemorySample, WatchRecord


class Outlet(Protocol):
    """Somebody who wants every sample, and what else happens."""

    def open(self) -> None: ...
    def sample(self, sample: MemorySample, record: WatchRecord) -> None: ...
    def event(self, kind: str, record: Any) -> None: ...
    def close(self, record: WatchRecord) -> None: ...


class JsonLines:
    """One JSON object a line, with `type`: sample, finding, out_of_memory, and watch at the end."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Begin the file anew.

        Raises:
            VramfitError: the file cannot be written.
        """
        try:
            self._file = self.path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def sample(self, sample: MemorySample, record: WatchRecord) -> None:
        self.event("sample", sample)

    def event(self, kind: str, record: Any) -> None:
        line = json.dumps({"type": kind, **to_data(record)}, ensure_ascii=False)
        with self._lock:  # samples come from a thread of their own
            if self._file is not None:
                try:
                    self._file.write(f"{line}\n")
                except OSError as error:
                    raise cannot_write(self.path, error) from None

    def close(self, record: WatchRecord) -> None:
        self.event("watch", {**to_data(record), "samples": []})
        if self._file is not None:
            self._file.close()
            self._file = None


class Prometheus:
    """A file in Prometheus' text format, replaced at every sample: for node_exporter's textfile collector."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def open(self) -> None:
        replace_file(self.path, b"")

    def sample(self, sample: MemorySample, record: WatchRecord) -> None:
        replace_file(self.path, prometheus_text(sample, record).encode())

    def event(self, kind: str, record: Any) -> None:
        pass

    def close(self, record: WatchRecord) -> None:
        if record.samples:
            self.sample(record.samples[-1], record)


def prometheus_text(sample: MemorySample, record: WatchRecord) -> str:
    """One moment in Prometheus' text format."""
    device = f'device="{record.device}"'
    now = {f'{device},kind="{kind}"': getattr(sample, f"{kind}_bytes") for kind in FIGURES}
    peaks = {f'{device},kind="{kind}"': getattr(record, f"peak_{kind}_bytes") for kind in FIGURES}
    phases = {
        f'{device},phase="{phase}",kind="{kind}"': getattr(use, f"peak_{kind}_bytes")
        for phase, use in record.phases.items()
        for kind in FIGURES[:3]
    }
    lines = [
        *_metric("vramfit_memory_bytes", "gauge", "Memory now.", now),
        *_metric("vramfit_peak_memory_bytes", "gauge", "Most so far.", peaks),
        *_metric("vramfit_phase_peak_bytes", "gauge", "Most in a phase.", phases),
        *_metric("vramfit_fragmentation_ratio", "gauge", "Reserved and in no block.", {device: sample.fragmentation}),
        *_metric("vramfit_allocator_retries_total", "counter", "Allocator retries.", {device: record.num_retries}),
        *_metric("vramfit_out_of_memory_total", "counter", "Out-of-memory errors.", {device: record.num_ooms}),
        *_metric("vramfit_steps_total", "counter", "Optimizer steps.", {device: record.num_steps}),
        *_metric("vramfit_findings", "gauge", "Habits that cost memory.", {device: len(record.findings)}),
    ]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, help: str, values: dict[str, float | int | None]) -> list[str]:
    shown = {labels: value for labels, value in values.items() if value is not None}
    if not shown:
        return []
    return [
        f"# HELP {name} {help}",
        f"# TYPE {name} {kind}",
        *(f"{name}{{{labels}}} {value:.17g}" for labels, value in shown.items()),
    ]
