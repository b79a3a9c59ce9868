"""`Stepper`: whole effective batches in, optimizer steps out; memory that runs out costs nothing.

A window is a transaction. Whatever fails before the optimizer's step is dropped, the random generators are turned
back, and the window is done again: first as it was, then in smaller micro-batches. The step itself is taken whole.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vramfit.errors import RecoveryExhausted, WorkloadError
from vramfit.runtime.random_state import RandomState
from vramfit.runtime.splitting import split
from vramfit.step.commit import secure_state, take_step
from vramfit.step.heads import HeadLoss, head_loss
from vramfit.step.inputs import Batch
from vramfit.step.out_of_memory import free_memory, is_out_of_memory
from vramfit.step.window import accumulate, clip
from vramfit.techniques import precision as precisions

SAME_SIZE_RETRIES = 1
"""A window is done again as it was once: freed and compacted memory is often enough."""
FIRST_PATIENCE = 50
"""Windows without trouble before a shrunken micro-batch grows again; doubled whenever growing fails."""


class Stepper:
    """Trains by effective batches.

    Args:
        model: any module that takes a batch's tensors as keywords and gives logits.
        optimizer: a torch optimizer over its parameters; a fused one is quickest.
        micro_batch: samples of full length that one forward pass may see; longer batches of shorter ones are allowed
            as long as their tokens, padding included, are no more.
        seq: the full length; None takes that of the first batch.
        max_grad_norm: clip the gradient of the whole window to this norm.
        scheduler: stepped once for each optimizer step that was taken.
        precision: fp32, tf32, amp-fp16 (with a GradScaler), amp-bf16, bf16.
        loss_fn, count_fn: for heads of your own: (output, batch) → the *sum* of the losses, and batch → how many
            they are. Without them, the labels of the batch decide.

    Raises:
        WorkloadError: a module that looks across the samples of a batch (BatchNorm), or settings that contradict.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        micro_batch: int,
        seq: int | None = None,
        max_grad_norm: float | None = None,
        scheduler: Any = None,
        precision: str = "fp32",
        loss_fn: Callable[[Any, Batch], torch.Tensor] | None = None,
        count_fn: Callable[[Batch], int] | None = None,
    ) -> None:
        _check(model, micro_batch, precision, loss_fn, count_fn)
        self.model = model
        self.optimizer = optimizer
        self.micro_batch = micro_batch
        """Samples of full length in a forward pass now; smaller after memory ran out."""
        self.num_recoveries = 0
        """How often a window was done again."""
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_skipped = 0
        """Windows whose fp16 gradients overflowed: no step, and the scheduler waited."""
        self._allowed_micro_batch = micro_batch
        self._seq = seq
        self._max_grad_norm = max_grad_norm
        self._scheduler = scheduler
        self._device = next(model.parameters()).device
        self._autocast_dtype = precisions.autocast_dtype(precision)  # type: ignore[arg-type]
        self._scaler = torch.amp.GradScaler(self._device.type) if precision == "amp-fp16" else None
        self._loss = HeadLoss.custom(loss_fn, count_fn) if loss_fn and count_fn else None
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._patience = FIRST_PATIENCE
        self._num_quiet = 0

    def step(self, batch: Batch) -> float:
        """Learn from one effective batch; gives its mean loss.

        Raises:
            RecoveryExhausted: not even one sample at a time fits; weights and state are as before the call.
        """
        self._grow()
        self.optimizer.zero_grad(set_to_none=True)
        start = RandomState.now()
        attempts: list[str] = []
        while (loss := self._try(batch, attempts)) is None:
            self.optimizer.zero_grad(set_to_none=True)
            free_memory()
            start.restore()
            self.num_recoveries += 1
            self._num_quiet = 0
            if len(attempts) > SAME_SIZE_RETRIES:
                self._shrink(attempts)
        self._commit()
        self._num_quiet += 1
        return loss

    def _try(self, batch: Batch, attempts: list[str]) -> float | None:
        """Gradients of the window, unscaled and clipped, and its loss; None where memory ran out on the way."""
        try:
            loss = self._window(batch)
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            clip(self._parameters, self._max_grad_norm)
            secure_state(self.optimizer)
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            attempts.append(f"micro-batch {self.micro_batch}: {str(error).splitlines()[0]}")
            if self._scaler is not None:
                self._scaler._per_optimizer_states.pop(id(self.optimizer), None)
            return None
        return loss

    def _window(self, batch: Batch) -> float:
        width = int(batch["input_ids"].shape[1]) if "input_ids" in batch else 1
        self._seq = self._seq or width
        loss = self._loss or head_loss(self.model, batch)
        totals = loss.counts(batch)
        if not any(totals):
            raise WorkloadError(["the batch has no label that counts: all of them are ignored"])
        micro_batches = [b for b in split(batch, self.micro_batch * self._seq) if any(loss.counts(b))]
        scale = self._scaler.scale if self._scaler is not None else lambda value: value
        mean = accumulate(
            self.model,
            micro_batches,
            loss,
            totals,
            bring=self._bring,
            autocast=self._autocast,
            scale=scale,
        )
        return float(mean)

    def _bring(self, batch: Batch) -> Batch:
        return {name: value.to(self._device, non_blocking=True) for name, value in batch.items()}

    def _commit(self) -> None:
        """The step: taken whole, or skipped where fp16 overflowed; the scheduler follows only a step."""
        if self._scaler is not None:
            found = self._scaler._found_inf_per_device(self.optimizer)
            taken = not any(float(value) for value in found.values())
            if taken:
                take_step(self.optimizer)
            self._scaler.update()
        else:
            taken = True
            take_step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += taken
        self.num_skipped += not taken
        if taken and self._scheduler is not None:
            self._scheduler.step()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast_dtype)

    def _shrink(self, attempts: list[str]) -> None:
        if self.micro_batch == 1:
            raise RecoveryExhausted(
                f"one sample of {self._seq} tokens does not fit, after {len(attempts)} tries",
                attempts=attempts,
                hint="free the GPU, shorten the sequences, or plan with checkpointing",
            )
        if self.micro_batch < self._allowed_micro_batch:
            self._patience *= 2
        self.micro_batch //= 2
        del attempts[SAME_SIZE_RETRIES:]

    def _grow(self) -> None:
        """After a quiet time, try the next larger micro-batch."""
        if self.micro_batch < self._allowed_micro_batch and self._num_quiet >= self._patience:
            self.micro_batch = min(2 * self.micro_batch, self._allowed_micro_batch)
            self._num_quiet = 0


def _check(model: torch.nn.Module, micro_batch: int, precision: str, loss_fn: Any, count_fn: Any) -> None:
    problems = []
    if not isinstance(micro_batch, int) or micro_batch < 1:
        problems.append(f"micro_batch {micro_batch!r} is not a whole number from 1")
    if (loss_fn is None) != (count_fn is None):
        problems.append("loss_fn and count_fn go together: a sum, and what to divide it by")
    if precision not in ("fp32", "tf32", "amp-fp16", "amp-bf16", "bf16"):
        problems.append(f"precision {precision!r} is not fp32, tf32, amp-fp16, amp-bf16 or bf16")
    across = [
        name for name, m in model.named_modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.training
    ]
    if across:
        problems.append(
            f"{across[0]} is a BatchNorm: its result depends on the micro-batch, so no split gives the same training"
        )
    if problems:
        raise WorkloadError(problems)
