"""`MonitorCallback`: the memory of a Trainer's run, watched and logged; nothing in the training is changed."""

import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from vramfit.monitor.watch import Watch
from vramfit.records.watch import MemoryFinding, WatchRecord
from vramfit.report.findings import render_findings
from vramfit.runtime.watching import watch
from vramfit.units import GIB

DECIMALS = 4
"""Of a GiB: a tenth of a MiB."""


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Watches memory from the beginning of `train` to its end, as `vramfit.watch` does.

    Args:
        logs: add `vram_allocated_gib`, `vram_reserved_gib`, their peaks since training began, and on a GPU
            `vram_process_gib`, to what the Trainer logs. Metrics that an evaluation returns stay as they are.
        show: say at the end, on stderr, which habits cost memory; each once.
        detailed: follow every operator, as for `watch`: slower.
        interval_s: seconds between samples.
        jsonl, prometheus: files for the samples, begun anew by each `train`; written by the first process only.

    Raises:
        WorkloadError: an interval that is too short.

    A run that ends in an error never tells its callbacks: `close` ends the watch then, or the next `train` goes on
    with it.
    """

    def __init__(
        self,
        *,
        logs: bool = True,
        show: bool = True,
        detailed: bool = False,
        interval_s: float = 0.5,
        jsonl: str | Path | None = None,
        prometheus: str | Path | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {"detailed": detailed, "interval_s": interval_s, "show_findings": False}
        self._files: dict[str, Any] = {"jsonl": jsonl, "prometheus": prometheus}
        watch(**self._settings)  # refuses what it cannot do now, not when training begins
        self._logs = logs
        self._show = show
        self._told: set[tuple[str, str]] = set()
        self._record: WatchRecord | None = None
        self._leave: weakref.finalize[[Watch], MonitorCallback] | None = None
        self.watch: Watch | None = None
        """The watch, while it runs."""

    @property
    def record(self) -> WatchRecord | None:
        """What was seen, of the run that goes on or the last one; None before the first."""
        return self._record if self.watch is None else self.watch.record

    def attach(self, trainer: Any) -> "MonitorCallback":
        """Put it before the Trainer's other callbacks, so that those that report to TensorBoard and the like see the
        figures; `add_callback` puts it behind them."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def close(self, *, tell: bool = True) -> None:
        """End the watch, if it runs."""
        if self.watch is None:
            return
        seen, self.watch = self.watch, None
        if self._leave is not None:
            self._leave.detach()
        seen.__exit__(None, None, None)
        self._record = seen.record
        if tell and self._show:
            self._tell(seen.findings)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to watch."""
        if self.watch is None:
            files = self._files if state.is_world_process_zero else {}
            self.watch = watch(**self._settings, **files).__enter__()
            self._leave = weakref.finalize(self, _leave, self.watch)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add the figures."""
        if self.watch is None or not self._logs or logs is None:
            return
        figures = _figures(self.watch)
        history = state.log_history[-1] if state.log_history else {}
        if logs.keys() <= history.keys():  # the same entry, which was kept before callbacks were told
            history |= figures
        if "loss" in logs or "train_loss" in logs:  # an evaluation's are what a search for settings adds up
            logs |= figures

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Done."""
        self.close()

    def _tell(self, findings: tuple[MemoryFinding, ...]) -> None:
        new = [f for f in findings if (f.check, f.source) not in self._told]
        self._told |= {(f.check, f.source) for f in new}
        if new:
            from rich.console import Console

            Console(stderr=True).print(render_findings([f.as_finding() for f in new]))


def _figures(seen: Watch) -> dict[str, float]:
    """In GiB, where there is a device to ask; the host's memory is none of it."""
    now, record = seen.sample(), seen.record
    found = {
        "vram_allocated_gib": now.allocated_bytes,
        "vram_reserved_gib": now.reserved_bytes,
        "vram_peak_allocated_gib": record.peak_allocated_bytes,
        "vram_peak_reserved_gib": record.peak_reserved_bytes,
        "vram_process_gib": now.process_bytes if record.device.startswith("cuda") else None,
    }
    return {name: round(value / GIB, DECIMALS) for name, value in found.items() if value is not None}


def _leave(seen: Watch) -> None:
    """For a callback that is gone: its Trainer has failed, or the program ends."""
    with suppress(Exception):
        seen.__exit__(None, None, None)
