"""The steppers of a fitted Trainer: that of its plan and, where it packs, one for batches that cannot be packed."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vramfit.integrations.trainer import failure
from vramfit.integrations.trainer.heads import LossPair, Origin
from vramfit.integrations.trainer.monitoring import MonitorCallback
from vramfit.integrations.trainer.packable import why_padded
from vramfit.planner.heuristics import FUSED_SHARE, PADDED_SHARE
from vramfit.records.plan import Plan
from vramfit.records.watch import OutOfMemoryReport, WatchRecord
from vramfit.runtime.state.model_state import ModelState
from vramfit.runtime.stepper import Stepper
from vramfit.step.plain import Batch


@dataclass(slots=True)
class Fit:
    """What a fitted Trainer knows beside."""

    plan: Plan
    origin: Origin
    loss: LossPair | None
    monitor: MonitorCallback
    waits: bool = True
    """Whether batches wait on the host until a pass takes its part of one."""
    attention: str | None = None
    """Of transformers, where it was asked for."""
    stepper: Stepper | None = None
    padded: Stepper | None = None
    """Beside one that packs: for batches that cannot be."""
    num_padded: int = 0
    """Steps of a packed plan that were padded."""
    states: dict[str, ModelState] = field(default_factory=dict)
    """Of the model, for what no stepper does: steps that are never split, and evaluation batches."""
    report: OutOfMemoryReport | None = None
    """What was alive when memory ran out in a pass that cannot be made smaller."""
    num_recoveries: int = 0
    """Of steps and evaluation batches that were done again, without the stepper's."""

    @property
    def record(self) -> WatchRecord | None:
        """What the watch saw, of the training that goes on or the last one; None before the first."""
        return self.monitor.record


def is_packed(trainer: Any, batch: Batch) -> bool:
    """Whether the sequences of a batch are to lie end to end; the first batch that cannot be packed is spoken of."""
    fit: Fit = trainer.vramfit
    w = fit.plan.workload
    if not w.is_packed:
        return False
    why = why_padded(batch, trainer.model, w.task)
    if why is not None:
        fit.num_padded += 1
        if fit.num_padded == 1:
            warnings.warn(f"step {trainer.state.global_step + 1} is padded: {why}", stacklevel=3)
    return why is None


def stepper_for(trainer: Any, *, packs: bool) -> Stepper:
    """The stepper of a batch, for the model and the optimizer of this call of `train`."""
    fit: Fit = trainer.vramfit
    optimizer = failure.bare_optimizer(trainer)
    made = fit.stepper or fit.padded
    if made is not None and (made.optimizer is not optimizer or made.model is not trainer.model):
        fit.num_recoveries = trainer.num_recoveries
        fit.stepper = fit.padded = None
    if fit.plan.workload.is_packed and not packs:
        share = FUSED_SHARE if fit.plan.workload.is_fused else PADDED_SHARE
        fit.padded = fit.padded or _new(trainer, optimizer, packs=False, share=share)
        return fit.padded
    fit.stepper = fit.stepper or _new(trainer, optimizer, packs=packs)
    return fit.stepper


@contextmanager
def state_kept(trainer: Any, purpose: str) -> Iterator[ModelState]:
    """Inside, the state of the model that the Trainer has now is kept, and the Trainer's own numbers with it."""
    states: dict[str, ModelState] = trainer.vramfit.states
    if purpose not in states or states[purpose].model is not trainer.model:
        states[purpose] = ModelState(trainer.model, loss=trainer.compute_loss_func)
    state = states[purpose]
    state.keep(beside=trainer)
    try:
        yield state
    finally:
        state.let_go()  # or it would keep a Trainer that is dropped, and its model, alive


def _new(trainer: Any, optimizer: Any, *, packs: bool, share: int = 1) -> Stepper:
    """A stepper whose passes have a share of the plan's tokens: fewer samples, or less than a whole one's."""
    fit: Fit = trainer.vramfit
    micro_batch, seq = fit.plan.micro_batch, fit.plan.workload.seq
    if micro_batch >= share:
        micro_batch //= share
    else:
        seq = max(seq // share, 1)
    stepper = Stepper(
        trainer.model,
        optimizer,
        micro_batch=micro_batch,
        seq=seq,
        precision=fit.plan.workload.precision,
        attention="packed" if packs else "sdpa",
        loss_fn=fit.loss[0] if fit.loss else None,
        count_fn=fit.loss[1] if fit.loss else None,
    )
    if trainer.accelerator.scaler is not None:
        stepper.scaler = trainer.accelerator.scaler
    return stepper
