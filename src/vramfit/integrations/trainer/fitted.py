"""`FittedTrainer`: mixed into the class of a Trainer, so that a step is a whole effective batch that cannot die.

The Trainer's own loop stays: order of samples, callbacks, clipping, optimizer, schedule, logs and checkpoints. What it
asks of a step, a gradient and a loss, is made by `Stepper`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vramfit.errors import RecoveryExhausted, WorkloadError
from vramfit.integrations.trainer import monitoring
from vramfit.integrations.trainer.models import LossPair, Origin, encoder_in, step_model
from vramfit.integrations.trainer.monitoring import MonitorCallback
from vramfit.integrations.trainer.rows import num_rows, samples_of, why_padded
from vramfit.integrations.trainer.settings import prepare_steps, put_techniques, put_together_once
from vramfit.integrations.trainer.texts import TextSteps, comparing, make_head
from vramfit.monitor.places import warn_user
from vramfit.planner.heuristics import FUSED_SHARE, PADDED_SHARE
from vramfit.records.plan import Plan
from vramfit.records.watch import OutOfMemoryReport, WatchRecord
from vramfit.runtime.model_state import Failed, ModelState
from vramfit.runtime.stepper import SAME_SIZE_RETRIES, Stepper
from vramfit.step.plain import Batch
from vramfit.step.recovery import is_out_of_memory
from vramfit.tasks.parts.losses import HeadLoss, head_loss
from vramfit.tasks.parts.pooling import EmbeddingHead
from vramfit.techniques import packing
from vramfit.techniques.application import undo_to_steps


@dataclass(slots=True)
class Fit:
    """What a fitted Trainer knows beside."""

    plan: Plan
    origin: Origin
    loss: LossPair | None
    monitor: MonitorCallback
    waits: bool = True
    """Whether batches wait on the host until a pass takes its part of one."""
    attn_implementation: str | None = None
    """Of transformers, where it was asked for."""
    texts: TextSteps | None = None
    """How texts are compared; None where a step is a mean over samples or labels."""
    head: tuple[Any, EmbeddingHead] | None = None
    """The model that it is for, and what makes vectors of texts out of its encoder's outputs."""
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

    def read(self, trainer: Any, inputs: Any) -> tuple[Batch, HeadLoss | None, EmbeddingHead | None]:
        """The samples of a batch; where texts are compared, a row for each text, their loss and the model's head."""
        if self.texts is None:
            return samples_of(inputs), None, None
        if self.head is None or self.head[0] is not trainer.model:
            self.head = trainer.model, make_head(trainer, self.texts)
        return *self.texts.read(trainer, inputs, self.head[1]), self.head[1]


class FittedTrainer:
    """Put before the class of a Trainer by `fit_trainer`."""

    vramfit: Fit

    @property
    def num_recoveries(self) -> int:
        """How often something was done again because memory had run out."""
        fit = self.vramfit
        return fit.num_recoveries + sum(s.num_recoveries for s in (fit.stepper, fit.padded) if s is not None)

    def train(self: Any, *given: Any, **keywords: Any) -> Any:
        """As the Trainer's own; memory that runs out where nothing can be done again is explained."""
        prepare_steps(step_model(self), self.vramfit.plan.workload)
        try:
            return super().train(*given, **keywords)  # type: ignore[misc]
        except BaseException as error:
            if not _is_unexplained(error):
                raise
            raise monitoring.outside_a_step(self, error) from error
        finally:
            self.vramfit.monitor.close(tell=False)  # a run that failed has not told its callbacks
            undo_to_steps(step_model(self))

    def evaluation_loop(self: Any, *given: Any, **keywords: Any) -> Any:
        """As the Trainer's own; what piles up between its batches is put together once, or explained."""
        try:
            with put_together_once():
                return super().evaluation_loop(*given, **keywords)  # type: ignore[misc]
        except BaseException as error:
            if not _is_unexplained(error):
                raise
            raise monitoring.between_batches(self, error) from error

    def call_model_init(self: Any, trial: Any = None) -> Any:
        """A model that the Trainer makes anew gets the same treatment."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        put_techniques(encoder_in(model), self.vramfit.plan.workload, self.vramfit.attn_implementation)
        prepare_steps(encoder_in(model), self.vramfit.plan.workload)
        return model

    def get_train_dataloader(self: Any) -> Any:
        """As the Trainer's own, but batches stay on the host: a pass brings what it needs, and nothing waits."""
        placed = self.accelerator.device_placement
        self.accelerator.device_placement = placed and not self.vramfit.waits
        try:
            return super().get_train_dataloader()  # type: ignore[misc]
        finally:
            self.accelerator.device_placement = placed

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As the Trainer's own; its count of labels, which only a loss of the script's own reads, waits on the host."""
        device = torch.device("cpu") if self.vramfit.waits else device
        return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Gradients of a whole effective batch, in passes that fit; gives its mean loss."""
        if self.state.global_step == 0:
            _check_size(self, inputs)
        if self.vramfit.origin == "own":
            return self._whole_step(model, inputs, num_items_in_batch)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        fit: Fit = self.vramfit
        batch, loss, head = fit.read(self, inputs if fit.waits else self._prepare_inputs(inputs))
        packs = is_packed(self, batch)
        stepper = stepper_for(self, packs=packs)
        stepper.on_out_of_memory = lambda error: self._see_last(stepper, error)
        passed = step_model(self)
        try:
            with _forward_as_written(passed), comparing(self, head), packing.in_use(passed) if packs else nullcontext():
                stepper.loss = loss or stepper.loss
                return stepper.gradients(batch)
        except RecoveryExhausted as error:
            raise monitoring.given_up(self, error, fit.report) from None
        finally:
            stepper.on_out_of_memory = None  # or it would keep a Trainer that is dropped, and its model, alive

    def _see_last(self: Any, stepper: Stepper, error: BaseException) -> None:
        """Look at what is alive where passes cannot be made smaller; before that, nothing is lost yet."""
        if stepper.micro_batch == 1:
            self.vramfit.report = monitoring.see(self, error)

    def _whole_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """A step whose loss only the Trainer's class knows: never split, done again as it was."""
        own_step = super().training_step  # type: ignore[misc]
        return self._repeated(
            "training",
            lambda: own_step(model, dict(inputs), num_items_in_batch),
            monitoring.unsplit,
            drop=lambda: self.model.zero_grad(set_to_none=True),
        )

    def _repeated(
        self: Any, purpose: str, run: Callable[[], Any], given_up: Any, *, drop: Callable[[], None] = lambda: None
    ) -> Any:
        """What cannot be split, done again as it was where memory runs out.

        Args:
            given_up: makes the error where it never fits.
            drop: lets go of what a run has left.
        """
        attempts: list[str] = []
        trains = purpose == "training"

        def see(error: BaseException) -> None:
            if len(attempts) == SAME_SIZE_RETRIES:
                self.vramfit.report = monitoring.see(self, error, None if trains else "evaluation")

        with state_kept(self, purpose) as state:
            while len(attempts) <= SAME_SIZE_RETRIES:
                found = state.attempt(run, see=see, drop=drop)
                if not isinstance(found, Failed):
                    if trains:
                        state.learn()
                    return found
                attempts.append(found.message)
                self.vramfit.num_recoveries += 1
        raise given_up(self, attempts, self.vramfit.report)

    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """An evaluation batch; in halves where memory runs out."""
        own_step = super().prediction_step  # type: ignore[misc]
        if self.vramfit.texts is not None:  # their loss is that of the whole batch, and of no half
            return self._repeated(
                "evaluation",
                lambda: own_step(model, {**inputs}, prediction_loss_only, ignore_keys),
                monitoring.compared_batch,
            )

        def see(error: BaseException) -> None:
            if len(next(iter(samples_of(inputs).values()))) < 2:
                self.vramfit.report = monitoring.see(self, error, "evaluation")

        with state_kept(self, "evaluation") as state:
            found = state.attempt(
                lambda: own_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys), see=see
            )
        if not isinstance(found, Failed):
            return found
        batch = samples_of(inputs)
        if len(next(iter(batch.values()))) < 2:
            raise monitoring.one_sample([found.message], self.vramfit.report)
        self.vramfit.num_recoveries += 1
        return self._predict_halves(model, batch, prediction_loss_only, ignore_keys)

    def _predict_halves(
        self: Any, model: Any, batch: Batch, prediction_loss_only: bool, ignore_keys: Any
    ) -> tuple[Any, Any, Any]:
        from transformers.trainer_pt_utils import nested_concat

        num_samples = len(next(iter(batch.values())))
        halves = [_rows(batch, 0, num_samples // 2), _rows(batch, num_samples // 2, num_samples)]
        parts = [self.prediction_step(model, half, prediction_loss_only, ignore_keys) for half in halves]
        shares = [self._count(half) for half in halves]
        losses = [part[0] * share for part, share in zip(parts, shares, strict=True) if part[0] is not None and share]
        loss = torch.stack(losses).sum() / sum(shares) if losses else None
        logits, labels = (
            None if parts[0][i] is None else nested_concat(parts[0][i], parts[1][i], padding_index=-100) for i in (1, 2)
        )
        return loss, logits, labels

    def _count(self: Any, batch: Batch) -> int:
        """What a batch's mean loss is a mean over."""
        if self.vramfit.loss is not None:
            return int(self.vramfit.loss[1](batch))
        if self.vramfit.origin == "head" and not {"labels", "start_positions"}.isdisjoint(batch):
            return sum(head_loss(self.model, batch).counts(batch))
        return len(next(iter(batch.values())))


def _is_unexplained(error: BaseException) -> bool:
    return is_out_of_memory(error) and not isinstance(error, monitoring.TrainerOutOfMemory)


def _check_size(trainer: Any, inputs: Any) -> None:
    """The first step has all its samples, or a data loader of the user's own makes other batches.

    Raises:
        WorkloadError: with both sizes.
    """
    found = max((num_rows(value) or 0 for value in dict(inputs).values()), default=0)
    dataset, batch = trainer.train_dataset, trainer.vramfit.plan.workload.batch
    expected = min(batch, len(dataset)) if hasattr(dataset, "__len__") else batch
    if found != expected:
        raise WorkloadError(
            [f"the data loader gives {found} samples, and a step is to have {expected}"],
            hint="let get_train_dataloader make batches of self._train_batch_size samples, which are whole steps now",
        )


def _rows(batch: Batch, first: int, last: int) -> Batch:
    return {name: value[first:last] for name, value in batch.items()}


@contextmanager
def _forward_as_written(model: Any) -> Iterator[None]:
    """Without accelerate's autocast around it, which turns logits into fp32 copies: the stepper brings its own."""
    written = vars(model).get("_original_forward")
    if written is None:
        yield
        return
    wrapped = model.forward
    model.forward = written
    try:
        yield
    finally:
        model.forward = wrapped


def is_packed(trainer: Any, batch: Batch) -> bool:
    """Whether the sequences of a batch are to lie end to end; the first batch that cannot be packed is spoken of."""
    fit: Fit = trainer.vramfit
    w = fit.plan.workload
    if not w.is_packed:
        return False
    why = why_padded(batch, step_model(trainer), w.task)
    if why is not None:
        fit.num_padded += 1
        if fit.num_padded == 1:
            warn_user(f"step {trainer.state.global_step + 1} is padded: {why}")
    return why is None


def stepper_for(trainer: Any, *, packs: bool) -> Stepper:
    """The stepper of a batch, for the model and the optimizer of this call of `train`."""
    fit: Fit = trainer.vramfit
    optimizer = monitoring.bare_optimizer(trainer)
    made = fit.stepper or fit.padded
    if made is not None and (made.optimizer is not optimizer or made.model is not step_model(trainer)):
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
        step_model(trainer),
        optimizer,
        replace(fit.plan.workload, memory=None),  # the budget is enforced already
        micro_batch=micro_batch,
        seq=seq,
        attention="packed" if packs else "sdpa",
        loss_fn=fit.loss[0] if fit.loss else None,
        count_fn=fit.loss[1] if fit.loss else None,
    )
    if trainer.accelerator.scaler is not None:
        stepper.scaler = trainer.accelerator.scaler
    return stepper
