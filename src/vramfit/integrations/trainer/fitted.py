"""`FittedTrainer`: mixed into the class of a Trainer, so that a step is a whole effective batch that cannot die.

The Trainer's own loop stays: order of samples, callbacks, clipping, optimizer, schedule, logs and checkpoints. What it
asks of a step, a gradient and a loss, is made by `Stepper`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.errors import RecoveryExhausted, WorkloadError
from vramfit.integrations.trainer.heads import LossPair, Origin
from vramfit.records.plan import Plan
from vramfit.runtime.random_state import RandomState
from vramfit.runtime.stepper import SAME_SIZE_RETRIES, Stepper
from vramfit.step.heads import head_loss
from vramfit.step.inputs import Batch
from vramfit.step.out_of_memory import free_memory, is_out_of_memory
from vramfit.techniques.application import apply_techniques
from vramfit.units import format_bytes


@dataclass(slots=True)
class Fit:
    """What a fitted Trainer knows beside."""

    plan: Plan
    origin: Origin
    loss: LossPair | None
    stepper: Stepper | None = None
    num_recoveries: int = 0
    """Of steps and evaluation batches that were done again, without the stepper's."""


class FittedTrainer:
    """Put before the class of a Trainer by `fit_trainer`."""

    vramfit: Fit

    @property
    def num_recoveries(self) -> int:
        """How often something was done again because memory had run out."""
        stepper = self.vramfit.stepper
        return self.vramfit.num_recoveries + (0 if stepper is None else stepper.num_recoveries)

    def train(self: Any, *given: Any, **keywords: Any) -> Any:
        """As the Trainer's own; memory that runs out where nothing can be done again is explained."""
        try:
            return super().train(*given, **keywords)  # type: ignore[misc]
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            raise _outside_a_step(self, error) from error

    def evaluation_loop(self: Any, *given: Any, **keywords: Any) -> Any:
        """As the Trainer's own; what piles up between its batches is explained."""
        try:
            return super().evaluation_loop(*given, **keywords)  # type: ignore[misc]
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            raise _between_batches(self, error) from error

    def call_model_init(self: Any, trial: Any = None) -> Any:
        """A model that the Trainer makes anew gets the same treatment."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        apply_techniques(model, self.vramfit.plan.workload)
        return model

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Gradients of a whole effective batch, in passes that fit; gives its mean loss."""
        if self.state.global_step == 0:
            _check_size(self, inputs)
        if self.vramfit.origin == "own":
            return self._whole_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batch = samples_of(self._prepare_inputs(inputs))
        try:
            with _forward_as_written(self.model):
                return self._stepper().gradients(batch)  # type: ignore[no-any-return]
        except RecoveryExhausted as error:
            raise _given_up(self.vramfit.plan, self.state.global_step, error) from None

    def _stepper(self: Any) -> Stepper:
        """For the model and the optimizer of this call of `train`."""
        fit: Fit = self.vramfit
        optimizer = _bare(self.optimizer)
        if fit.stepper is None or fit.stepper.optimizer is not optimizer or fit.stepper.model is not self.model:
            w = fit.plan.workload
            fit.num_recoveries = self.num_recoveries
            fit.stepper = Stepper(
                self.model,
                optimizer,
                micro_batch=fit.plan.micro_batch,
                seq=w.seq,
                precision=w.precision,
                loss_fn=fit.loss[0] if fit.loss else None,
                count_fn=fit.loss[1] if fit.loss else None,
                scaler=self.accelerator.scaler,
            )
        return fit.stepper

    def _whole_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """A step whose loss only the Trainer's class knows: never split, done again as it was."""
        start = RandomState.now()
        attempts: list[str] = []
        while len(attempts) <= SAME_SIZE_RETRIES:
            try:
                return super().training_step(model, dict(inputs), num_items_in_batch)  # type: ignore[misc, no-any-return]
            except BaseException as error:
                if not is_out_of_memory(error):
                    raise
                attempts.append(str(error).splitlines()[0])
            self.model.zero_grad(set_to_none=True)
            free_memory()
            start.restore()
            self.vramfit.num_recoveries += 1
        raise RecoveryExhausted(
            f"step {self.state.global_step + 1} found no memory in {len(attempts)} tries, and cannot be split: "
            f"{type(self).__name__} computes a loss of its own, which need not be a mean over samples",
            attempts=attempts,
            hint="give fit_trainer the loss as loss_fn (a sum over samples) and count_fn (how many they are)",
        )

    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """An evaluation batch; in halves where memory runs out."""
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)  # type: ignore[misc, no-any-return]
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            message = str(error).splitlines()[0]
        free_memory()
        self.vramfit.num_recoveries += 1
        return self._predict_halves(model, inputs, prediction_loss_only, ignore_keys, message)  # type: ignore[no-any-return]

    def _predict_halves(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any, message: str
    ) -> tuple[Any, Any, Any]:
        from transformers.trainer_pt_utils import nested_concat

        batch = samples_of(inputs)
        num_samples = len(next(iter(batch.values())))
        if num_samples < 2:
            raise RecoveryExhausted(
                "one sample of an evaluation does not fit beside the training state",
                attempts=[message],
                hint="free the GPU, or shorten the sequences of eval_dataset",
            )
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


def _outside_a_step(trainer: Any, error: BaseException) -> RecoveryExhausted:
    optimizer = type(_bare(trainer.optimizer)).__name__
    return RecoveryExhausted(
        f"memory ran out after {trainer.state.global_step} steps, outside their passes: clipping, the step of "
        f"{optimizer} and callbacks are the Trainer's own, and what they have half done cannot be done again",
        attempts=[str(error).splitlines()[0]],
        hint='set optim="adamw_torch_fused", whose step takes no memory; '
        "trainer.train(resume_from_checkpoint=True) goes on from the last checkpoint",
    )


def _between_batches(trainer: Any, error: BaseException) -> RecoveryExhausted:
    args = trainer.args
    return RecoveryExhausted(
        f"memory ran out between the batches of an evaluation, while logits of up to {args.eval_accumulation_steps} of "
        "them were kept on the GPU",
        attempts=[str(error).splitlines()[0]],
        hint="set eval_accumulation_steps=1, and preprocess_logits_for_metrics to keep only what the metrics need",
    )


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


def _bare(optimizer: Any) -> Any:
    """Beneath what accelerate puts around it."""
    from accelerate.optimizer import AcceleratedOptimizer

    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


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


def _given_up(plan: Plan, num_steps: int, error: RecoveryExhausted) -> RecoveryExhausted:
    """With what was planned, and the settings that take least."""
    fitting = [a for a in plan.alternatives if a.fits and a.allowed]
    least = min(fitting, key=lambda a: a.safe_reserved_bytes, default=None)
    hint = error.hint or ""
    if least is not None:
        hint = (
            f"of what was predicted, {least.settings} in passes of {least.micro_batch} takes least, "
            f"{format_bytes(least.safe_reserved_bytes)}: fit_trainer finds it where memory= says what is really free"
        )
    return RecoveryExhausted(
        f"step {num_steps + 1}: {error}; {format_bytes(plan.estimate.safe_reserved_bytes)} of "
        f"{format_bytes(plan.budget_bytes)} were planned for it",
        attempts=error.attempts,
        hint=hint,
    )
