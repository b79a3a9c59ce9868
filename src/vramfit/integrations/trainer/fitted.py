"""`FittedTrainer`: mixed into the class of a Trainer, so that a step is a whole effective batch that cannot die.

The Trainer's own loop stays: order of samples, callbacks, clipping, optimizer, schedule, logs and checkpoints. What it
asks of a step, a gradient and a loss, is made by `Stepper`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from vramfit.errors import RecoveryExhausted, WorkloadError
from vramfit.integrations.trainer import failure
from vramfit.integrations.trainer.rows import put_together_once
from vramfit.integrations.trainer.settings import prepare_steps, put_techniques
from vramfit.integrations.trainer.steppers import Fit, is_packed, state_kept, stepper_for
from vramfit.runtime.model_state import Failed
from vramfit.runtime.stepper import SAME_SIZE_RETRIES, Stepper
from vramfit.step.out_of_memory import is_out_of_memory
from vramfit.step.plain import Batch
from vramfit.tasks.parts.losses import head_loss
from vramfit.techniques import packing
from vramfit.techniques.application import undo_to_steps


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
        prepare_steps(self.model, self.vramfit.plan.workload)
        try:
            return super().train(*given, **keywords)  # type: ignore[misc]
        except BaseException as error:
            if not _is_unexplained(error):
                raise
            raise failure.outside_a_step(self, error) from error
        finally:
            self.vramfit.monitor.close(tell=False)  # a run that failed has not told its callbacks
            undo_to_steps(self.model)

    def evaluation_loop(self: Any, *given: Any, **keywords: Any) -> Any:
        """As the Trainer's own; what piles up between its batches is put together once, or explained."""
        try:
            with put_together_once():
                return super().evaluation_loop(*given, **keywords)  # type: ignore[misc]
        except BaseException as error:
            if not _is_unexplained(error):
                raise
            raise failure.between_batches(self, error) from error

    def call_model_init(self: Any, trial: Any = None) -> Any:
        """A model that the Trainer makes anew gets the same treatment."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        put_techniques(model, self.vramfit.plan.workload, self.vramfit.attention)
        prepare_steps(model, self.vramfit.plan.workload)
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
        batch = samples_of(inputs if self.vramfit.waits else self._prepare_inputs(inputs))
        packs = is_packed(self, batch)
        stepper = stepper_for(self, packs=packs)
        stepper.on_out_of_memory = lambda error: self._see_last(stepper, error)
        try:
            with _forward_as_written(self.model), packing.in_use(self.model) if packs else nullcontext():
                return stepper.gradients(batch)
        except RecoveryExhausted as error:
            raise failure.given_up(self, error, self.vramfit.report) from None
        finally:
            stepper.on_out_of_memory = None  # or it would keep a Trainer that is dropped, and its model, alive

    def _see_last(self: Any, stepper: Stepper, error: BaseException) -> None:
        """Look at what is alive where passes cannot be made smaller; before that, nothing is lost yet."""
        if stepper.micro_batch == 1:
            self.vramfit.report = failure.see(self, error)

    def _whole_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """A step whose loss only the Trainer's class knows: never split, done again as it was."""
        attempts: list[str] = []
        own_step = super().training_step  # type: ignore[misc]

        def see(error: BaseException) -> None:
            if len(attempts) == SAME_SIZE_RETRIES:
                self.vramfit.report = failure.see(self, error)

        with state_kept(self, "training") as state:
            while len(attempts) <= SAME_SIZE_RETRIES:
                loss = state.attempt(
                    lambda: own_step(model, dict(inputs), num_items_in_batch),
                    see=see,
                    drop=lambda: self.model.zero_grad(set_to_none=True),
                )
                if not isinstance(loss, Failed):
                    state.learn()
                    return loss
                attempts.append(loss.message)
                self.vramfit.num_recoveries += 1
        raise failure.unsplit(self, attempts, self.vramfit.report)

    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """An evaluation batch; in halves where memory runs out."""
        own_step = super().prediction_step  # type: ignore[misc]

        def see(error: BaseException) -> None:
            if len(next(iter(samples_of(inputs).values()))) < 2:
                self.vramfit.report = failure.see(self, error, "evaluation")

        with state_kept(self, "evaluation") as state:
            found = state.attempt(
                lambda: own_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys), see=see
            )
        if not isinstance(found, Failed):
            return found  # type: ignore[no-any-return]
        batch = samples_of(inputs)
        if len(next(iter(batch.values()))) < 2:
            raise failure.one_sample([found.message], self.vramfit.report)
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
    return is_out_of_memory(error) and not isinstance(error, failure.TrainerOutOfMemory)


def _check_size(trainer: Any, inputs: Any) -> None:
    """The first step has all its samples, or a data loader of the user's own makes other batches.

    Raises:
        WorkloadError: with both sizes.
    """
    found = max((_num_rows(value) or 0 for value in dict(inputs).values()), default=0)
    dataset, batch = trainer.train_dataset, trainer.vramfit.plan.workload.batch
    expected = min(batch, len(dataset)) if hasattr(dataset, "__len__") else batch
    if found != expected:
        raise WorkloadError(
            [f"the data loader gives {found} samples, and a step is to have {expected}"],
            hint="let get_train_dataloader make batches of self._train_batch_size samples, which are whole steps now",
        )


def samples_of(inputs: Any) -> Batch:
    """The inputs of a batch, each with a row for every sample.

    Raises:
        WorkloadError: an input that cannot be split, by name.
    """
    batch = dict(inputs) if isinstance(inputs, Mapping) or hasattr(inputs, "items") else {}
    sizes = {name: _num_rows(value) for name, value in batch.items() if value is not None}
    num_samples = next((n for n in sizes.values() if n is not None), None)
    wrong = [name for name, n in sizes.items() if n is None or n != num_samples]
    if wrong or num_samples is None:
        named = ", ".join(wrong) or type(inputs).__name__
        raise WorkloadError(
            [f"the data collator gives {named}, which has no row for each of the {num_samples or 0} samples"],
            hint="leave it out of the batch: a step is split by samples",
        )
    return {name: value for name, value in batch.items() if value is not None}


def _num_rows(value: Any) -> int | None:
    return int(value.shape[0]) if isinstance(value, torch.Tensor) and value.dim() else None


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
