"""`Step`: one optimizer step in micro-batches. A prediction, an emulated GPU and a run all execute this code.

A step has three parts: `passes` (forward and backward over the micro-batches), `finish` (gradients of all ranks,
unscaled and clipped; optimizer state) and `commit` (the optimizer's step). Everything before the commit can be dropped
and done again: the `Stepper` does so where memory runs out. A prediction calls the three parts on the meta device.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.errors import WorkloadError
from vramfit.step.commit import secure_state, take_host_step, take_step
from vramfit.step.joint import joint_passes
from vramfit.step.plain import Autocast, Batch, OnPart
from vramfit.step.splitting import Ranks
from vramfit.tasks.parts.losses import HeadLoss
from vramfit.techniques.offloading.host_step import HostStep


class Step:
    """The step of a model and its optimizer.

    Args:
        ranks: the processes that share every effective batch, or `Alone`.
        host: the optimizer's home in host memory; None where it is on the device.
        scaler: of amp-fp16.
        autocast: the context of a forward pass.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        ranks: Ranks,
        host: HostStep | None = None,
        scaler: torch.amp.GradScaler | None = None,
        autocast: Autocast = nullcontext,
        max_grad_norm: float | None = None,
    ) -> None:
        self.model, self.optimizer, self.ranks, self.host = model, optimizer, ranks, host
        self.scaler, self.autocast, self.max_grad_norm = scaler, autocast, max_grad_norm
        self.bring: Callable[[Batch], Batch] = lambda batch: batch
        """Puts a micro-batch on the device when its turn comes."""
        self.place: Callable[[torch.Tensor], torch.Tensor] = lambda value: value
        """Puts a tensor of the whole effective batch on the device, where a loss looks at all of it."""
        self.on_part: OnPart = lambda part, index: None
        """Told which part of a micro-batch begins."""
        self.on_output: Callable[[Any, Batch], None] = lambda output, batch: None
        """Sees what the model gave for each micro-batch."""
        self.keeps_gradients = False
        """Whether a commit leaves gradients in their places, as CUDA graphs need them."""
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.with_gradients = list(dict.fromkeys([*self.parameters, *model.parameters()]))
        """Whatever may have a gradient: what the optimizer steps, and what the model computes with."""
        self._is_host_traced = host is not None and host.traces

    @property
    def device(self) -> torch.device:
        """Where passes compute; what the optimizer steps may be in host memory."""
        device: torch.device = self.parameters[0].device if self.host is None else self.host.device
        return device

    def passes(
        self,
        parts: Sequence[Batch],
        loss: HeadLoss,
        totals: Sequence[int],
        *,
        num_counted: int | None = None,
        finishes: bool = True,
    ) -> torch.Tensor:
        """Forward and backward over the micro-batches; leaves the gradients of the mean loss of all of them.

        Args:
            parts: the micro-batches.
            totals: the counts of the whole effective batch, one for each term of the loss.
            num_counted: micro-batches that count, the first ones; later ones are dummy passes, for ranks that wait for
                each other. None counts all.
            finishes: whether these are all passes of the step.

        Returns:
            The loss of the effective batch, detached; of no micro-batch, 0.
        """
        if self.host is not None:
            self.host.begin(is_only_pass=finishes and len(parts) == 1)
        self.ranks.begin()
        if loss.joint is not None:
            return joint_passes(self, parts, loss, len(parts) if num_counted is None else num_counted)
        mean: torch.Tensor | None = None
        for index, waiting in enumerate(parts):
            self.begin("forward", index, len(parts))
            batch = self.bring(waiting)
            if loss.completes is not None:
                batch = loss.completes(batch)
            with self.autocast():
                output = self.model(**loss.inputs(batch))
                self.on_output(output, batch)
                terms = [s / n for s, n in zip(loss.sums(output, batch), totals, strict=True) if n]
                value = torch.stack(terms).sum() if len(terms) > 1 else terms[0]
                if num_counted is not None and index >= num_counted:
                    value = value * 0
            if not value.requires_grad:
                raise WorkloadError(["the loss depends on no parameter that learns, so there is no gradient"])
            del output, terms
            self.begin("backward", index, len(parts))
            self.scaled(value).backward()
            self.begin("forward", index, len(parts))
            mean = value.detach().clone() if mean is None else mean.add_(value.detach())
            del value, batch
        return torch.zeros((), device=self.device) if mean is None else mean

    def finish(self, *, clips: bool = True) -> None:
        """Gradients become those of all ranks, unscaled and clipped, and the optimizer has its state.

        Args:
            clips: False leaves them scaled and as they are, for a loop that goes on by itself.
        """
        with self._where_optimizer_is():
            if self.host is not None:
                self.host.gather()
            self.ranks.votes.agree()
            self.ranks.synchronise()
            if clips and self.scaler is not None and not self._is_host_traced:
                self.ranks.unscale(self.scaler, self.optimizer)
            if clips and self.host is not None:
                self.host.clip(self.max_grad_norm)
            elif clips:
                self.ranks.clip(self.parameters, self.max_grad_norm)
            secure_state(self.optimizer)
        self.ranks.votes.agree()

    def commit(self, room: Callable[[], int] = lambda: 0) -> bool:
        """The optimizer's step, taken whole, or skipped where fp16 gradients overflowed; gradients go.

        Args:
            room: gives the bytes that a step can use without raising the peak.

        Returns:
            Whether the step was taken.
        """
        taken = not self._has_overflowed()
        if taken and self.host is not None:
            with self._where_optimizer_is():
                take_host_step(self.optimizer, self.host)
        elif taken:
            take_step(self.optimizer, room=room, size_of=self.ranks.size_of)
        if self.scaler is not None and not self._is_host_traced:
            with self._where_optimizer_is():
                self.scaler.update()
        self.drop_gradients()
        return taken

    def drop_gradients(self) -> None:
        """No parameter has a gradient; those that keep theirs have zeros."""
        if self.keeps_gradients:
            self.optimizer.zero_grad(set_to_none=False)
            return
        if self.host is not None:
            self.host.drop()
        else:
            self.optimizer.zero_grad()
        for parameter in self.model.parameters():  # also those that the optimizer does not step
            parameter.grad = None

    def forget(self) -> None:
        """As if the step had not begun."""
        self.ranks.forget()
        self.drop_gradients()
        if self.scaler is not None:
            self.scaler._per_optimizer_states.pop(id(self.optimizer), None)
            if self.scaler._growth_tracker is None:
                self.scaler._scale = None  # memory ran out between the two; a scaler makes them together or not at all

    def begin(self, part: str, index: int, num_passes: int) -> None:
        """A part of a pass begins."""
        self.on_part(part, index)
        self.ranks.before_pass(index, num_passes)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss as its gradients are taken: of amp-fp16, scaled."""
        if self.scaler is None:
            return loss
        if self.host is None:
            return self.scaler.scale(loss)
        with _disable_current_modes():  # gradients are unscaled on the host, so the scale is there too, as a number
            if self.scaler._scale is None:
                self.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
            scale = self.scaler.get_scale()
        return loss * scale

    def _has_overflowed(self) -> bool:
        """Whether fp16 gradients did; of those without data, as a prediction has them, none did."""
        if self.scaler is None or self._is_host_traced:
            return False
        with self._where_optimizer_is():
            found = self.scaler._found_inf_per_device(self.optimizer)
            return any(float(value) for value in found.values() if not value.is_meta)

    def _where_optimizer_is(self) -> AbstractContextManager[Any]:
        """What happens in host memory is no business of an emulated GPU; a trace follows the copies to the device."""
        return nullcontext() if self.host is None or self._is_host_traced else _disable_current_modes()
