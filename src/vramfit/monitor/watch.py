"""`Watch`: a program's memory while it runs: by phase, with what it wastes, and what is alive when memory runs out."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator, suppress
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import IO, Any
from weakref import WeakSet, ref

import torch

from vramfit.errors import VramfitError
from vramfit.monitor.ledger import Ledger, categories, python_tensors
from vramfit.monitor.noticing import Noticing
from vramfit.monitor.outlets import Outlet
from vramfit.monitor.phases import Phases
from vramfit.monitor.places import (
    JobSeen,
    first_line,
    frames_of,
    module_of,
    remedies_without_a_model,
    requested_bytes,
    see_job,
    source_of,
    user_line,
)
from vramfit.monitor.sources import FIGURES, MemorySource, PhasePeaks, Reading, held_bytes
from vramfit.records.watch import LiveTensors, MemoryFinding, MemorySample, OutOfMemoryReport, WatchPhase, WatchRecord

MAX_GROUPS = 200
MAX_REPORTS = 8
MAX_NOTES = 8
GROWN_TO_LOOK_AGAIN = 1.01


Adviser = Callable[[JobSeen, OutOfMemoryReport, MemorySource], Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchSettings:
    """How a program is watched."""

    detailed: bool = False
    """Follow every operator: largest tensors, leaks, what was alive. Costs time; exact peaks by phase."""
    interval_s: float = 0.5
    """Seconds between samples."""
    outlets: tuple[Outlet, ...] = ()
    """Who is told of every sample beside the record."""
    on_sample: Callable[[WatchRecord], None] | None = None
    """Called with the record after every sample, in a thread of its own."""
    is_out_of_memory: Callable[[BaseException], bool] = lambda error: isinstance(error, torch.OutOfMemoryError)
    """Whether an error means that the GPU's memory ran out."""
    advise: Adviser | None = None
    """Asked for the settings that would have fitted, when memory runs out."""
    show_findings: bool = True
    """Write findings at the end."""
    stream: IO[str] | None = None
    """Where findings and reports are written in plain words; standard error if not given."""


class Watch(ContextDecorator):
    """Watches what runs inside a `with` block, or a decorated function; made by `vramfit.watch`.

    Args:
        source: the memory that is watched.
        settings: how.
    """

    def __init__(self, source: MemorySource, settings: WatchSettings) -> None:
        self._settings = settings
        self._source = source
        self._outlets = settings.outlets
        self._peaks = PhasePeaks()
        self._phases = Phases(self, self._guarded)
        self._ledger = Ledger(self._owns, lambda: self._phases.current, self._failed) if settings.detailed else None
        self._models: WeakSet[torch.nn.Module] = WeakSet()
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._noticing = Noticing(
            self._ledger, self._owns, self._categories, lambda: self._source.name == "cpu", self._phases.retained
        )
        self._job = JobSeen()
        self._model: ref[torch.nn.Module] | None = None
        self._largest: tuple[LiveTensors, ...] = ()
        self._largest_bytes = 0
        self._device = source.name
        self._reports: list[OutOfMemoryReport] = []
        self._told: set[tuple[str, str]] = set()
        self._notes: list[str] = []
        self._began: Reading | None = None
        self._sampler: threading.Thread | None = None
        self._end = threading.Event()
        self._pid = 0

    def __enter__(self) -> "Watch":
        if self._sampler is not None:
            raise VramfitError("this watch is running already", hint="make another one: vramfit.watch()")
        for outlet in self._outlets:
            outlet.open()
        self._pid = os.getpid()
        self._began = self._began or self._source.read()
        self._restart(self._read())
        self._phases.start()
        if self._ledger is not None:
            self._ledger.__enter__()
        self._end.clear()
        self._sampler = threading.Thread(target=self._sample_on, name="vramfit-watch", daemon=True)
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid or self._sampler is None:
            return  # a fork of the program that is watched
        if self._ledger is not None:
            self._ledger.__exit__(None, None, None)
        self._phases.stop()
        self._end.set()
        self._sampler.join(timeout=5)
        self._sampler = None
        frame = sys._getframe(1)
        self._guarded(lambda: self._finish(frame))
        if value is not None and self._settings.is_out_of_memory(value):
            self._guarded(lambda: self._report(value, trace))
        elif self._settings.show_findings:
            self._guarded(self._tell)
        self._guarded(self._close)

    @property
    def record(self) -> WatchRecord:
        """What was seen so far."""
        began, last = self._began or Reading(), self._peaks.last
        last_sample = self._peaks.samples[-1].time_s if self._peaks.samples else 0.0
        return WatchRecord(
            device=self._source.name,
            detailed=self._settings.detailed,
            time_s=last_sample if self._sampler is None else self._now(),
            num_steps=self._phases.step,
            num_forwards=self._phases.num_forwards,
            capacity_bytes=self._source.capacity_bytes,
            phases=self._peaks.phases(),
            **{f"peak_{name}": self._peaks.peak(name) for name in FIGURES},
            peak_process_bytes=self._peaks.peak_process_bytes,
            num_retries=max(last.num_retries - began.num_retries, 0),
            num_ooms=max(last.num_ooms - began.num_ooms, 0),
            samples=tuple(self._peaks.samples),
            findings=self.findings,
            largest=self._largest,
            out_of_memory=tuple(self._reports),
            notes=tuple(dict.fromkeys([*filter(None, [self._source.note()]), *self._notes])),
        )

    @property
    def findings(self) -> tuple[MemoryFinding, ...]:
        """Habits that cost memory, the largest first."""
        return self._noticing.findings(sized=held_bytes(self._peaks.last) is not None)

    def sample(self) -> MemorySample:
        """Memory now."""
        reading = self._read()
        return MemorySample(
            time_s=self._now(),
            phase=self._phases.current,
            step=self._phases.step,
            process_bytes=self._source.process_bytes(),
            **{name: getattr(reading, name) for name in (*FIGURES, "num_retries", "num_ooms")},
        )

    def capture(
        self,
        error: BaseException,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> OutOfMemoryReport | None:
        """What is alive now, for a program that deals with an out-of-memory error itself; `record` keeps it too.

        To be called inside `except`, where all that the error's frames hold is alive. None where the look failed.

        Args:
            model, optimizer: whose tensors are weights and state, where they have not run inside the watch yet.
        """
        if model is not None:
            self._models.add(model)
        if optimizer is not None:
            self._optimizers.add(optimizer)
        del self._reports[MAX_REPORTS - 1 :]
        num_before = len(self._reports)

        def look() -> None:
            frames, root = frames_of(error.__traceback__), self._model() if self._model is not None else model
            operator = self._ledger.last.operator if self._ledger is not None else ""
            self._capture(error, operator, module_of(frames, root), source_of(frames))

        self._guarded(look)
        return self._reports[-1] if len(self._reports) > num_before else None

    # what the phases tell

    def on_phase(self, old: WatchPhase, new: WatchPhase) -> None:
        if self._ledger is not None and self._source.name != self._device:
            self._device = self._source.name
            self._ledger.keep_only("cuda" if self._device.startswith("cuda") else "cpu")
        reading = self._read()
        self._peaks.leave(old, reading)
        self._keep_largest(reading)
        self._restart(reading)

    def on_forward(self, model: torch.nn.Module, inputs: dict[str, Any]) -> None:
        self._models.add(model)
        self._model, self._job = ref(model), see_job(inputs)
        if self._ledger is not None:
            self._ledger.know(model)
        held, frame = held_bytes(self._peaks.last), sys._getframe(1)
        self._noticing.forward(model, inputs, self._phases.num_forwards, held, user_line(frame))
        if not model.training and self._noticing.next_round(frame, evaluating=True, held=held):
            self._announce()

    def on_output(self, model: torch.nn.Module, output: Any) -> None:
        if self._noticing.wants_output(model, self._phases.num_forwards):  # a reading costs time
            reading = self._read()
            self._peaks.see(self._phases.current, reading)
            self._noticing.output(output, held_bytes(reading))

    def on_backward(self, forward_number: int) -> None:
        self._noticing.backward(forward_number)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.add(optimizer)
        if self._noticing.next_round(sys._getframe(1), evaluating=False, held=held_bytes(self._peaks.last)):
            self._announce()

    # the rest is ours

    def _guarded(self, work: Callable[[], None]) -> None:
        """Nothing that goes wrong in here may reach the program that is watched."""
        try:
            work()
        except Exception as error:
            note = f"the watch missed something: {type(error).__name__}: {str(error)[:200]}"
            if note not in self._notes and len(self._notes) < MAX_NOTES:
                self._notes.append(note)

    def _now(self) -> float:
        return time.perf_counter() - self._peaks.began_at

    def _owns(self, tensor: torch.Tensor) -> bool:
        return self._source.owns(tensor)

    def _read(self) -> Reading:
        reading = self._source.read()
        if reading.requested_bytes is None and self._ledger is not None:
            reading = replace(
                reading, requested_bytes=self._ledger.live_bytes, peak_requested_bytes=self._ledger.peak_bytes
            )
        return reading

    def _restart(self, reading: Reading) -> None:
        """Begin a phase; in detail, with peaks that count from here."""
        if self._ledger is not None:
            self._source.restart_peaks()
            self._ledger.restart_peak()
            reading = replace(reading, **{f"peak_{name}": getattr(reading, name) for name in FIGURES})
        self._peaks.enter(reading)

    def _categories(self) -> dict[int, str]:
        return categories(list(self._models), list(self._optimizers))

    def _keep_largest(self, reading: Reading) -> None:
        held = held_bytes(reading) or 0
        if self._ledger is not None and held > GROWN_TO_LOOK_AGAIN * self._largest_bytes:
            self._largest_bytes = held
            self._largest = self._ledger.alive(self._categories())[:MAX_GROUPS]

    def _announce(self) -> None:
        """Tell the outlets of what is new."""
        if not self._outlets:
            return
        for finding in self.findings:
            key = finding.check, finding.source
            if key not in self._told:
                self._told.add(key)
                for outlet in self._outlets:
                    outlet.event("finding", finding)

    def _sample_on(self) -> None:
        while True:
            self._guarded(self._take_sample)
            if self._end.wait(self._settings.interval_s):
                return

    def _take_sample(self) -> None:
        sample = self.sample()
        self._peaks.sample(sample, self._source.name)
        if not self._outlets and self._settings.on_sample is None:
            return
        record = self.record
        for outlet in self._outlets:
            outlet.sample(sample, record)
        if self._settings.on_sample is not None:
            self._settings.on_sample(record)

    def _finish(self, frame: FrameType) -> None:
        """The last reading, the last look."""
        reading = self._read()
        self._peaks.leave(self._phases.current, reading)
        self._keep_largest(reading)
        self._take_sample()
        self._noticing.finish(frame, self._phases.num_forwards, held_bytes(reading))
        self._announce()

    def _close(self) -> None:
        record = self.record
        for outlet in self._outlets:
            outlet.close(record)

    def _failed(self, error: BaseException, operator: str, module: str) -> None:
        """An operator failed; all that was alive still is."""
        if self._settings.is_out_of_memory(error) and len(self._reports) < MAX_REPORTS:
            self._guarded(lambda: self._capture(error, operator, module, user_line()))

    def _capture(self, error: BaseException, operator: str, module: str, source: str) -> None:
        reading = self._read()
        self._noticing.cut_short(held_bytes(reading))
        if self._ledger is not None:
            alive = self._ledger.alive(self._categories())[:MAX_GROUPS]
        else:
            alive = python_tensors(self._source.owns, self._categories(), reading.requested_bytes)[:MAX_GROUPS]
        report = OutOfMemoryReport(
            message=first_line(error),
            phase=self._phases.current,
            step=self._phases.step,
            module=module,
            operator=operator,
            source=source,
            requested_bytes=requested_bytes(error),
            allocated_bytes=reading.allocated_bytes,
            reserved_bytes=reading.reserved_bytes,
            alive=alive,
            findings=self.findings,
        )
        self._reports.append(report)
        for outlet in self._outlets:
            outlet.event("out_of_memory", report)

    def _report(self, error: BaseException, trace: TracebackType | None) -> None:
        """Say what was alive, then what would have helped, before the error goes on to the user."""
        frames, model = frames_of(trace), self._model() if self._model is not None else None
        if not self._reports or self._reports[-1].message != first_line(error):
            operator = self._ledger.last.operator if self._ledger is not None else ""
            self._capture(error, operator, module_of(frames, model), source_of(frames))
        report = self._reports[-1]
        if not report.source:
            report = replace(report, source=source_of(frames))
        report = replace(report, findings=self.findings)
        self._write(report.lines())
        job = replace(self._job, model=model)
        advice = self._settings.advise(job, report, self._source) if self._settings.advise is not None else ()
        remedies = tuple(advice) or tuple(remedies_without_a_model(report))
        self._reports[-1] = replace(report, remedies=remedies)
        self._write(f"  → {line}" for line in remedies)

    def _tell(self) -> None:
        for finding in self.findings:
            shown = finding.as_finding()
            self._write([f"vramfit: {shown.what}", f"  → {shown.fix}"])

    def _write(self, lines: Iterable[str]) -> None:
        stream = self._settings.stream or sys.stderr
        with suppress(OSError, ValueError):  # a terminal that has gone
            stream.write("".join(f"{line}\n" for line in lines))
            stream.flush()
