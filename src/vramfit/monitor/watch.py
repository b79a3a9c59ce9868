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
from vramfit.monitor.failure import frames_of, module_of, remedies_without_a_model, source_of
from vramfit.monitor.habits import Candidate, KeptGraphs, Look, Padding, Piles
from vramfit.monitor.inventory import categories, python_tensors
from vramfit.monitor.leaks import leak_findings
from vramfit.monitor.ledger import Ledger
from vramfit.monitor.outlets import Outlet
from vramfit.monitor.phases import Phases
from vramfit.monitor.places import user_line
from vramfit.monitor.sources import MemorySource, Reading
from vramfit.monitor.tally import Tally
from vramfit.records.watch import LiveTensors, MemoryFinding, MemorySample, OutOfMemoryReport, WatchPhase, WatchRecord

LOOKS_UNTIL = 8
"""Rounds after each of which the user's variables are looked through; from then on at powers of two."""
MAX_GROUPS = 200
MAX_REPORTS = 8
GROWN_TO_LOOK_AGAIN = 1.01


@dataclass(slots=True)
class JobSeen:
    """What a watch knows of the job, for whoever can plan one."""

    model: torch.nn.Module | None = None
    """The one that was called last, if it still lives."""
    training: bool = True
    batch: int | None = None
    seq: int | None = None
    autocast: torch.dtype | None = None
    optimizer: str | None = None


Adviser = Callable[[JobSeen, OutOfMemoryReport, MemorySource], Sequence[str]]


class Watch(ContextDecorator):
    """Watches what runs inside a `with` block, or a decorated function; made by `vramfit.watch`.

    Args:
        source: the memory that is watched.
        detailed: follow every operator: largest tensors, leaks, what was alive. Costs time; exact peaks by phase.
        interval_s: seconds between samples.
        outlets: who is told of every sample beside the record.
        on_sample: called with the record after every sample, in a thread of its own.
        is_out_of_memory: whether an error means that the GPU's memory ran out.
        advise: asked for the settings that would have fitted, when memory runs out.
        show_findings: write findings at the end.
        stream: where findings and reports are written in plain words; standard error if not given.
    """

    def __init__(
        self,
        source: MemorySource,
        *,
        detailed: bool = False,
        interval_s: float = 0.5,
        outlets: Sequence[Outlet] = (),
        on_sample: Callable[[WatchRecord], None] | None = None,
        is_out_of_memory: Callable[[BaseException], bool] = lambda error: isinstance(error, torch.OutOfMemoryError),
        advise: Adviser | None = None,
        show_findings: bool = True,
        stream: IO[str] | None = None,
    ) -> None:
        self.detailed = detailed
        self._source = source
        self._interval_s = interval_s
        self._outlets = tuple(outlets)
        self._on_sample = on_sample
        self._is_out_of_memory = is_out_of_memory
        self._advise = advise
        self._show_findings = show_findings
        self._stream = stream
        self._tally = Tally()
        self._phases = Phases(self, self._guarded)
        self._ledger = Ledger(self._owns, lambda: self._phases.current, self._failed) if detailed else None
        self._graphs, self._piles, self._padding = KeptGraphs(), Piles(), Padding()
        self._models: WeakSet[torch.nn.Module] = WeakSet()
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._job = JobSeen()
        self._model: ref[torch.nn.Module] | None = None
        self._model_name = ""
        self._line = ""
        self._before_forward: int | None = None
        self._leaks: dict[str, tuple[WatchPhase, MemoryFinding]] = {}
        self._first_round: int | None = None
        self._round = 0
        self._round_evaluates = False
        self._largest: tuple[LiveTensors, ...] = ()
        self._largest_bytes = 0
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
        if value is not None and self._is_out_of_memory(value):
            self._guarded(lambda: self._report(value, trace))
        elif self._show_findings:
            self._guarded(self._tell)
        record = self.record
        for outlet in self._outlets:
            outlet.close(record)

    @property
    def record(self) -> WatchRecord:
        """What was seen so far."""
        began, last = self._began or Reading(), self._tally.last
        last_sample = self._tally.samples[-1].time_s if self._tally.samples else 0.0
        return WatchRecord(
            device=self._source.name,
            detailed=self.detailed,
            time_s=last_sample if self._sampler is None else self._now(),
            num_steps=self._phases.step,
            num_forwards=self._phases.num_forwards,
            capacity_bytes=self._source.capacity_bytes,
            phases=self._tally.phases(),
            peak_requested_bytes=self._tally.peak("requested_bytes"),
            peak_allocated_bytes=self._tally.peak("allocated_bytes"),
            peak_reserved_bytes=self._tally.peak("reserved_bytes"),
            peak_process_bytes=self._tally.peak_process_bytes,
            num_retries=max(last.num_retries - began.num_retries, 0),
            num_ooms=max(last.num_ooms - began.num_ooms, 0),
            samples=tuple(self._tally.samples),
            findings=self.findings,
            largest=self._largest,
            out_of_memory=tuple(self._reports),
            notes=tuple(dict.fromkeys([*filter(None, [self._source.note()]), *self._notes])),
        )

    @property
    def findings(self) -> tuple[MemoryFinding, ...]:
        """Habits that cost memory, the dearest first."""
        found = [*self._graphs.findings(sized=self._sized), *self._piles.findings()]
        padding = self._padding.finding(self._model_name)
        found += [padding] if padding is not None else []
        found += self._unexplained_leaks(found)
        return tuple(sorted(found, key=lambda f: -f.num_bytes))

    def _unexplained_leaks(self, found: Sequence[MemoryFinding]) -> list[MemoryFinding]:
        """Leaks that no other finding names: not on the same line, nor kept by a graph that is named."""
        named = {finding.source for finding in found}
        graph_kept = any(finding.check == "watch.eval-keeps-graph" for finding in found)
        return [
            leak
            for source, (phase, leak) in self._leaks.items()
            if source not in named and not (graph_kept and phase == "evaluation")
        ]

    def sample(self) -> MemorySample:
        """Memory now."""
        reading = self._read()
        return MemorySample(
            time_s=self._now(),
            phase=self._phases.current,
            step=self._phases.step,
            requested_bytes=reading.requested_bytes,
            allocated_bytes=reading.allocated_bytes,
            reserved_bytes=reading.reserved_bytes,
            process_bytes=self._source.process_bytes(),
            num_retries=reading.num_retries,
            num_ooms=reading.num_ooms,
        )

    # what the phases tell

    def on_phase(self, old: WatchPhase, new: WatchPhase) -> None:
        reading = self._read()
        self._tally.leave(old, reading)
        self._keep_largest(reading)
        self._restart(reading)

    def on_forward(self, model: torch.nn.Module, inputs: dict[str, Any]) -> None:
        self._models.add(model)
        if self._ledger is not None:
            self._ledger.know(model)
        number = self._phases.num_forwards
        self._graphs.settle(number)
        self._line = user_line()
        self._model, self._model_name = ref(model), type(model).__name__
        self._see_job(model, inputs)
        if self._padding.wants(number):
            self._padding.look(inputs, self._line)
        if not model.training:
            self._next_round(sys._getframe(1), evaluating=True)
        self._before_forward = self._held(self._tally.last)

    def on_output(self, model: torch.nn.Module, output: Any) -> None:
        reading = self._read()
        self._tally.see(self._phases.current, reading)
        now, before = self._held(reading), self._before_forward
        grown = max(now - before, 0) if now is not None and before is not None else 0
        self._padding.took(grown)
        seen = Candidate(type(model).__name__, self._line, grown, self._phases.num_forwards)
        self._graphs.output(model, output, seen)

    def on_backward(self, forward_number: int) -> None:
        self._graphs.backward(forward_number)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.add(optimizer)
        self._job.optimizer = _optimizer_name(optimizer)
        self._next_round(sys._getframe(1), evaluating=False)

    # the rest is ours

    def _guarded(self, work: Callable[[], None]) -> None:
        """Nothing that goes wrong in here may reach the program that is watched."""
        try:
            work()
        except Exception as error:
            self._notes.append(f"the watch missed something: {type(error).__name__}: {str(error)[:200]}")

    def _now(self) -> float:
        return time.perf_counter() - self._tally.began_at

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
            reading = replace(
                reading,
                peak_requested_bytes=reading.requested_bytes,
                peak_allocated_bytes=reading.allocated_bytes,
                peak_reserved_bytes=reading.reserved_bytes,
            )
        self._tally.enter(reading)

    @staticmethod
    def _held(reading: Reading) -> int | None:
        return reading.allocated_bytes if reading.allocated_bytes is not None else reading.requested_bytes

    @property
    def _sized(self) -> bool:
        return self._held(self._tally.last) is not None

    def _categories(self) -> dict[int, str]:
        return categories(list(self._models), list(self._optimizers))

    def _keep_largest(self, reading: Reading) -> None:
        held = self._held(reading) or 0
        if self._ledger is not None and held > GROWN_TO_LOOK_AGAIN * self._largest_bytes:
            self._largest_bytes = held
            self._largest = self._ledger.alive(self._categories())[:MAX_GROUPS]

    def _next_round(self, frame: FrameType, *, evaluating: bool) -> None:
        """A step, or a batch of an evaluation, is over."""
        if evaluating != self._round_evaluates:
            self._round, self._round_evaluates = 0, evaluating
        self._round += 1
        if self._round == 2:  # the first step brings optimizer state
            self._first_round = self._held(self._tally.last)
        if self._ledger is not None:
            self._ledger.next_round()
        if self._round <= LOOKS_UNTIL or self._round & (self._round - 1) == 0:
            self._look(frame)
            self._announce()

    def _look(self, frame: FrameType) -> None:
        """Look for what piles up: in the user's variables, and in detail among all that is alive."""
        held = self._held(self._tally.last)
        look = Look(
            module=self._model_name,
            evaluating=self._round_evaluates,
            grown_bytes=held - self._first_round if held is not None and self._first_round is not None else 0,
            owns=self._source.owns,
            origin=self._ledger.origin if self._ledger is not None else lambda tensor: None,
        )
        self._piles.look(frame, look)
        if self._ledger is not None:
            for phase, leak in leak_findings(self._ledger.leaks(self._categories())):
                known = self._leaks.get(leak.source)
                if known is None or leak.num_bytes >= known[1].num_bytes:
                    self._leaks[leak.source] = phase, leak

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

    def _see_job(self, model: torch.nn.Module, inputs: dict[str, Any]) -> None:
        job = self._job
        job.training = model.training
        tokens = next((v for v in inputs.values() if isinstance(v, torch.Tensor) and v.dim() >= 2), None)
        if tokens is not None:
            job.batch, job.seq = tokens.shape[0], tokens.shape[1]
            kind = tokens.device.type
            job.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _sample_on(self) -> None:
        while True:
            self._guarded(self._take_sample)
            if self._end.wait(self._interval_s):
                return

    def _take_sample(self) -> None:
        sample = self.sample()
        self._tally.sample(sample)
        if not self._outlets and self._on_sample is None:
            return
        record = self.record
        for outlet in self._outlets:
            outlet.sample(sample, record)
        if self._on_sample is not None:
            self._on_sample(record)

    def _finish(self, frame: FrameType) -> None:
        """The last reading, the last look."""
        self._graphs.settle(self._phases.num_forwards + 1)
        reading = self._read()
        self._tally.leave(self._phases.current, reading)
        self._keep_largest(reading)
        self._take_sample()
        self._look(frame)
        self._announce()

    def _failed(self, error: BaseException, operator: str, module: str) -> None:
        """An operator failed; all that was alive still is."""
        if self._is_out_of_memory(error) and len(self._reports) < MAX_REPORTS:
            self._guarded(lambda: self._capture(error, operator, module, user_line()))

    def _capture(self, error: BaseException, operator: str, module: str, source: str) -> None:
        reading = self._read()
        if self._ledger is not None:
            alive = self._ledger.alive(self._categories())[:MAX_GROUPS]
        else:
            alive = python_tensors(self._source.owns, self._categories(), reading.requested_bytes)[:MAX_GROUPS]
        report = OutOfMemoryReport(
            message=str(error).splitlines()[0][:600] if str(error) else type(error).__name__,
            phase=self._phases.current,
            step=self._phases.step,
            module=module,
            operator=operator,
            source=source,
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
        message = str(error).splitlines()[0][:600] if str(error) else ""
        if not self._reports or self._reports[-1].message != message:
            operator = self._ledger.last.operator if self._ledger is not None else ""
            self._capture(error, operator, module_of(frames, model), source_of(frames))
        report = self._reports[-1]
        if not report.source:
            report = replace(report, source=source_of(frames))
        report = replace(report, findings=self.findings)
        self._write(report.lines())
        advice = (
            tuple(self._advise(replace(self._job, model=model), report, self._source))
            if self._advise is not None
            else ()
        )
        remedies = advice or tuple(remedies_without_a_model(report))
        self._reports[-1] = replace(report, remedies=remedies)
        self._write(f"  → {line}" for line in remedies)

    def _tell(self) -> None:
        for finding in self.findings:
            shown = finding.as_finding()
            self._write([f"vramfit: {shown.what}", f"  → {shown.fix}"])

    def _write(self, lines: Iterable[str]) -> None:
        stream = self._stream or sys.stderr
        with suppress(OSError, ValueError):  # a terminal that has gone
            stream.write("".join(f"{line}\n" for line in lines))
            stream.flush()


def _optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """As a workload names it; the class where it has no such name."""
    name = type(optimizer).__name__.lower()
    if name == "adamw":
        return "adamw-fused" if optimizer.defaults.get("fused") else "adamw"
    return name
