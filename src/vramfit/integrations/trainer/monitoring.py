"""The memory of a Trainer's run: watched and logged by `MonitorCallback`; and explained where it ran out for good."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from transformers import TrainerCallback

from vramfit.errors import RecoveryExhausted
from vramfit.monitor.places import first_line
from vramfit.monitor.watch import Watch
from vramfit.records.plan import Alternative, Plan
from vramfit.records.watch import MemoryFinding, OutOfMemoryReport, WatchPhase, WatchRecord
from vramfit.report.findings import render_findings
from vramfit.runtime.watching import Present, watch
from vramfit.units import GIB, MIB, format_bytes

DECIMALS = 4
"""Of a GiB: a tenth of a MiB."""


class Watching(TypedDict, total=False):
    """What a callback passes on to `watch`."""

    detailed: bool
    interval_s: float


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
        jsonl: str | Path | None = None,
        prometheus: str | Path | None = None,
        **watching: Unpack[Watching],
    ) -> None:
        self._settings: dict[str, Any] = {**watching, "show_findings": False}
        self._files: dict[str, Any] = {"jsonl": jsonl, "prometheus": prometheus}
        if watching:
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


class TrainerOutOfMemory(RecoveryExhausted, torch.OutOfMemoryError):
    """Out of memory in a fitted Trainer; its notes, which every traceback shows, say what was alive and what to do.

    Scripts that catch `torch.OutOfMemoryError`, or look for its words in a message, still find them.
    """

    def __init__(
        self, message: str, *, attempts: Sequence[str], hint: str | None, report: OutOfMemoryReport | None
    ) -> None:
        words = attempts[-1].partition(" GPU ")[0] if attempts else "out of memory"
        super().__init__(f"{message}; at last: {words}", attempts=attempts)
        self.report = report
        """What was alive; None where that could not be seen."""
        if report is not None:
            self.add_note("\n".join(report.lines()))
        self.hint = hint  # a note as well, and the last


def see(trainer: Any, error: BaseException, phase: WatchPhase | None = None) -> OutOfMemoryReport | None:
    """What is alive now, while an error is dealt with; for an evaluation on its own a watch is made for the moment."""
    monitor: MonitorCallback = trainer.vramfit.monitor
    if monitor.watch is not None:
        report = monitor.watch.capture(error, model=trainer.model, optimizer=bare_optimizer(trainer))
    else:
        with watch(show_findings=False) as moment:
            report = moment.capture(error, model=trainer.model, optimizer=bare_optimizer(trainer))
    if report is None:
        return None
    return replace(report, step=trainer.state.global_step, phase=phase or report.phase)


def bare_optimizer(trainer: Any) -> Any:
    """Beneath what accelerate puts around it."""
    from accelerate.optimizer import AcceleratedOptimizer

    optimizer = trainer.optimizer
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def given_up(trainer: Any, error: RecoveryExhausted, report: OutOfMemoryReport | None) -> TrainerOutOfMemory:
    """A step that did not fit in passes of one sample, with what was planned for it."""
    plan: Plan = trainer.vramfit.plan
    return TrainerOutOfMemory(
        f"step {trainer.state.global_step + 1}: {error}; {format_bytes(plan.estimate.safe_reserved_bytes)} of "
        f"{format_bytes(plan.budget_bytes)} were planned for it",
        attempts=error.attempts,
        hint="; ".join(_ways(plan, Present().budget_bytes(), report)) or error.hint,
        report=report,
    )


def _ways(plan: Plan, there_bytes: int | None, report: OutOfMemoryReport | None) -> Iterator[str]:
    """What is in the way, and the plan that would have worked with what is really there for this process."""
    alive = () if report is None else report.alive
    strange_bytes = sum(group.num_bytes for group in alive if group.category == "other")
    left_bytes = plan.budget_bytes - plan.estimate.safe_reserved_bytes
    if strange_bytes > left_bytes:
        yield (
            f"{format_bytes(strange_bytes)} of what was alive are neither the model's nor the optimizer's, and the "
            f"plan leaves {format_bytes(left_bytes)} to others: drop them, or fit a new Trainer with margin= what they "
            "take"
        )
        return
    known = [a for a in plan.alternatives if a.allowed]
    if there_bytes is not None and there_bytes < plan.budget_bytes:
        yield f"{format_bytes(there_bytes)} are there for this process, {format_bytes(plan.budget_bytes)} were planned"
        fitting = [a for a in known if a.safe_reserved_bytes <= there_bytes]
        if fitting:
            fastest = min(fitting, key=lambda a: a.step_time_s)
            yield f'{_words(fastest)} fits: a new Trainer, fitted with memory="{there_bytes // MIB}MiB", gets it'
            return
    least = min(known, key=lambda a: a.safe_reserved_bytes, default=None)
    if least is not None:
        yield f"of what was predicted, {_words(least)} takes least: fit a new Trainer with memory= what is really free"


def _words(way: Alternative) -> str:
    return f"{way.settings} in passes of {way.micro_batch} ({format_bytes(way.safe_reserved_bytes)} predicted)"


def unsplit(trainer: Any, attempts: Sequence[str], report: OutOfMemoryReport | None) -> TrainerOutOfMemory:
    """A step whose loss only the Trainer's class knows."""
    return TrainerOutOfMemory(
        f"step {trainer.state.global_step + 1} found no memory in {len(attempts)} tries, and cannot be split: "
        f"{type(trainer).__name__} computes a loss of its own, which need not be a mean over samples",
        attempts=attempts,
        hint="give fit_trainer the loss as loss_fn (a sum over samples) and count_fn (how many they are)",
        report=report,
    )


def one_sample(attempts: Sequence[str], report: OutOfMemoryReport | None) -> TrainerOutOfMemory:
    """An evaluation that was split as far as it can be."""
    return TrainerOutOfMemory(
        "one sample of an evaluation does not fit next to the training state",
        attempts=attempts,
        hint="free the GPU, or shorten the sequences of eval_dataset",
        report=report,
    )


def compared_batch(trainer: Any, attempts: Sequence[str], report: OutOfMemoryReport | None) -> TrainerOutOfMemory:
    """An evaluation batch whose loss compares its texts."""
    return TrainerOutOfMemory(
        f"an evaluation batch of {trainer.args.per_device_eval_batch_size} samples found no memory next to the "
        f"training state in {len(attempts)} tries, and its loss compares them, so that halves of it would be another "
        "loss",
        attempts=attempts,
        hint="set per_device_eval_batch_size lower; an evaluator of sentence-transformers has a batch_size of its own",
        report=report,
    )


def outside_a_step(trainer: Any, error: BaseException) -> TrainerOutOfMemory:
    """In what is the Trainer's own: clipping, the optimizer's step, callbacks."""
    optimizer = bare_optimizer(trainer)
    if any(group.get("fused") for group in getattr(optimizer, "param_groups", ())):
        what = "the optimizer's step takes none here: fit a new Trainer with margin= what callbacks take"
    else:
        what = 'set optim="adamw_torch_fused", whose step takes no memory'
    return TrainerOutOfMemory(
        f"memory ran out after {trainer.state.global_step} steps, outside their passes: clipping, the step of "
        f"{type(optimizer).__name__} and callbacks are the Trainer's own, and what they have half done cannot be done "
        "again",
        attempts=[first_line(error)],
        hint=f"{what}; trainer.train(resume_from_checkpoint=True) continues from the last checkpoint",
        report=see(trainer, error),
    )


def between_batches(trainer: Any, error: BaseException) -> TrainerOutOfMemory:
    """Where an evaluation keeps what its batches gave."""
    return TrainerOutOfMemory(
        "memory ran out between the batches of an evaluation, while logits of up to "
        f"{trainer.args.eval_accumulation_steps} of them were kept on the GPU",
        attempts=[first_line(error)],
        hint="set eval_accumulation_steps=1, and preprocess_logits_for_metrics to keep only what the metrics need",
        report=see(trainer, error, "evaluation"),
    )
