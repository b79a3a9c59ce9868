"""`Stepper`: whole effective batches in, optimizer steps out; memory that runs out costs nothing.

A window is a transaction. Whatever fails before the optimizer's step is dropped, the random generators and the model's
own state are turned back, and the window is done again: first as it was, then in smaller micro-batches, at last with
checkpointing. The step itself is taken whole.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vramfit.errors import RecoveryExhausted, WorkloadError
from vramfit.monitor.places import warn_user
from vramfit.records.plan import Plan
from vramfit.runtime.device import enforce
from vramfit.runtime.graphs import CannotCapture, GraphUse
from vramfit.runtime.interruption import uninterrupted
from vramfit.runtime.model_state import Failed, ModelState, untouched
from vramfit.runtime.step_settings import (
    MicroBatchSize,
    StepSettings,
    autocast,
    bring_packed,
    check,
    check_batch,
    check_once,
    largest_like,
)
from vramfit.settings import checkpointing
from vramfit.settings.casts import keeps_copies
from vramfit.step.own_loss import OWN_HINT, is_own, own_loss, telling_rows
from vramfit.step.plain import Batch, bring
from vramfit.step.recovery import free_memory, is_out_of_memory
from vramfit.step.splitting import Alone, Ranks, passes_of, take_rows, width_of
from vramfit.step.step import Step
from vramfit.tasks.parts.losses import HeadLoss, head_loss, needs_labels
from vramfit.techniques import compiling, offloading, packing
from vramfit.techniques.application import apply_to_steps, change, compile_layers, try_out
from vramfit.techniques.offloading.host_step import HostStep
from vramfit.techniques.packing.attention import has_packed_kernel
from vramfit.workload import Workload, settings_of

SAME_SIZE_RETRIES = 1
"""A window is done again as it was once: freed and compacted memory is often enough."""
NUM_REHEARSALS = 2
"""The first ends by making optimizer state, the second runs beside it."""


class Stepper:
    """Trains by effective batches.

    Args:
        model: any module that takes a batch's tensors as keywords and gives logits or a loss (docs/stepper.md); where
            there is a plan, prepared by `vramfit.prepare`.
        optimizer: a torch optimizer over its parameters; a fused one is quickest.
        plan: gives the settings that are not given, and has packed attention, fused layers, casts together and
            compiled layers put on a model that was not prepared; a `Workload` gives settings only.
        scheduler: stepped once for each optimizer step that was taken.
        loss_fn, count_fn: for heads of your own: (output, batch) → the *sum* of the losses, and batch → how many
            they are. Without them, the labels of the batch decide.
        ranks: the processes that share each effective batch (`Replicas`, `Shards`). Every one of them is given the
            whole batch and takes its part; `micro_batch` is what one of them passes at once.
        settings: `micro_batch`, `seq`, `precision`, `max_grad_norm`, `memory`, `offload`, `host_memory`, `graphs` and
            `attention`, as `StepSettings` says.

    Raises:
        WorkloadError: a module that looks across the samples of a batch (BatchNorm), or settings that contradict.
        BudgetExceeded: the process holds more than the budget already, or the host's memory is not enough.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan | Workload | None = None,
        *,
        scheduler: Any = None,
        loss_fn: Callable[[Any, Batch], torch.Tensor] | None = None,
        count_fn: Callable[[Batch], int] | None = None,
        ranks: Ranks | None = None,
        **settings: Any,
    ) -> None:
        chosen = StepSettings.of(plan, settings)
        if isinstance(plan, Plan):
            apply_to_steps(model, plan.workload)
            if plan.workload.is_compiled:
                compile_layers(model)
        check(model, optimizer, chosen, loss_fn, count_fn)
        if ranks is not None:
            chosen.check_ranks()
        self.model = model
        self.optimizer = optimizer
        self.ranks: Ranks = ranks if ranks is not None else Alone()
        """The processes that share the batches."""
        self.num_recoveries = 0
        """How often a window was done again."""
        self.num_steps = 0
        """Optimizer steps taken."""
        self.task: str | None = plan.workload.task if isinstance(plan, Plan) else None
        """Whose loss is taken; None takes the loss that the labels of each batch call for."""
        self.on_out_of_memory: Callable[[BaseException], None] | None = None
        """Told of every failure before the window is begun again, while all that it had is still alive."""
        self.num_skipped = 0
        """Windows whose fp16 gradients overflowed: no step, and the scheduler waited."""
        self._chosen = chosen
        self._packs = packing.is_applied(model) if chosen.has_own_attention else chosen.is_packed
        self._size = MicroBatchSize(chosen.micro_batch)
        self._seq = chosen.seq
        self._rehearsed: Batch | None = None
        """A whole batch, all of whose vectors are compared though few of its micro-batches are tried."""
        self._scheduler = scheduler
        layers = offloading.layer_slots_of(model)
        self._device = next(model.parameters()).device if layers is None else layers.device
        if chosen.memory is not None:
            enforce(chosen.memory, self._device)
        try_out(model, self._device, chosen.autocast_dtype if self._packs else None)
        self.host = HostStep(model, optimizer, host_memory=chosen.host_bytes) if chosen.steps_on_host else None
        """The optimizer's home in host memory; None where it is on the device."""
        keeps_casts = keeps_copies(on_host=self.host is not None, in_shards=self.ranks.is_sharded)
        self._autocast = partial(autocast, self._device.type, chosen.autocast_dtype, keeps_casts)
        scaled_on = self._device.type if self.host is None else "cpu"  # where the gradients are
        self._step = Step(
            model,
            optimizer,
            ranks=self.ranks,
            host=self.host,
            scaler=torch.amp.GradScaler(scaled_on) if chosen.scales_loss else None,
            autocast=self._autocast,
            max_grad_norm=chosen.max_grad_norm,
        )
        self._step.bring = self._bring = partial(bring_packed, model if self._packs else None, self._device)
        self._step.place = partial(bring, device=self._device)
        self.loss: HeadLoss | None = None
        """Of the user's, or of the next batch where a loop sets it; None where the labels of each batch decide."""
        if loss_fn and count_fn:
            self.loss = HeadLoss.custom(loss_fn, count_fn, takes_labels=needs_labels(model))
        self._reads_model = self.loss is None and not self._packs and is_own(model)
        self._step.on_output = check_once(loss_fn)
        self._state = ModelState(model, loss=loss_fn)
        is_plain = ranks is None and self.host is None and self._step.scaler is None and self.loss is None
        self._can_capture = self._packs and is_plain and has_packed_kernel(self._device, chosen)
        self._graph_use = GraphUse(model, self._autocast, is_on=chosen.graphs and self._can_capture)
        if chosen.has_tf32:
            torch.set_float32_matmul_precision("high")

    def step(self, batch: Batch) -> float:
        """Learn from one effective batch; gives its mean loss.

        Raises:
            RecoveryExhausted: not even one sample at a time fits; weights and state are as before the call.
            RankFailed: another process of the run has stopped.
        """
        return float(self.advance(batch))

    def advance(self, batch: Batch) -> torch.Tensor:
        """As `step`, but the loss stays on the device: the host need not wait, and can prepare the next batch."""
        self._size.grow()
        loss = self._gradients(batch)
        with uninterrupted():
            mean = self._commit_together(loss)
        self._size.quiet()
        return mean

    def gradients(self, batch: Batch) -> torch.Tensor:
        """Leave the gradients of one effective batch to a loop that clips and steps by itself; gives its mean loss.

        They are scaled where there is a GradScaler, and neither unscaled nor clipped. Optimizer state is made. Where
        passes are CUDA graphs, the next call writes its gradients to the same places: copy what is to be kept.

        Raises:
            RecoveryExhausted: not even one sample at a time fits; weights and state are as before the call.
        """
        self._size.grow()
        loss = self._gradients(batch, finishes=False)
        self._size.quiet()
        return self.ranks.total(loss)

    def rehearse(self, batch: Batch) -> None:
        """Run the largest micro-batches there can be, learning nothing: what does not fit shows now, not at step 4,000.

        Samples of `batch`, a whole effective batch, are repeated to full length and full micro-batches; optimizer
        state is made, and random generators and the model's own state are as before. What was cached on the way serves
        all later windows.

        Raises:
            RecoveryExhausted: not even one sample of full length fits.
        """
        self._seq = self._seq or width_of(batch)
        self._graph_use.is_paused = True  # eagerly first
        self._rehearsed = batch
        try:
            sizes = self._chosen.largest_sizes(batch, self.micro_batch * self.ranks.size, self._seq, packs=self._packs)
            for _ in range(NUM_REHEARSALS):
                self._try_out(largest_like(batch, *sizes, packs=self._packs))
            if self.uses_graphs and compiling.is_applied(self.model):  # no row is shorter: nothing is compiled later
                self._try_out(largest_like(batch, max(self.micro_batch // 2, 1), self._seq, packs=True))
        finally:
            self._graph_use.is_paused, self._rehearsed = False, None
        if self.uses_graphs:  # the largest first: the memory of all others lies in its own
            free_memory()
            self._try_out(largest_like(batch, min(sizes[0], self.micro_batch), self._seq, packs=True))

    def _try_out(self, batch: Batch) -> None:
        """A window that leaves nothing but optimizer state and cached memory."""
        self._gradients(batch)
        self._step.forget()
        self._state.put_back(is_tried_out=True)

    def change(self, plan: Plan | Workload) -> None:
        """Go on with the settings of another plan that can change between two steps: how a batch is split, which layers
        are computed twice, and whether passes are captured. All else stays as it is.

        Raises:
            WorkloadError: the plan differs in what cannot.
            BudgetExceeded: the process holds more than a plan's budget.
        """
        w = settings_of(plan)
        self._chosen.check_change(w, packs=self._packs)
        self._graph_use.release()
        change(self.model, w)
        self._size, self._chosen = MicroBatchSize(w.micro_batch), replace(self._chosen, row_texts=w.row_texts)
        self._graph_use = GraphUse(self.model, self._autocast, is_on=w.captures_graphs and self._can_capture)
        if isinstance(plan, Plan):
            enforce(plan.budget_bytes, self._device)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside model, optimizer and scheduler."""
        scaler = {} if self._step.scaler is None else self._step.scaler.state_dict()
        counts = {"num_recoveries": self.num_recoveries, "num_steps": self.num_steps, "num_skipped": self.num_skipped}
        kept = {"scaler": scaler, "seq": self._seq, "size": self._size.state_dict()}
        return kept | counts | {"graphs": not self._graph_use.has_stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a `state_dict` was taken."""
        if self._step.scaler is not None and state["scaler"]:
            self._step.scaler.load_state_dict(state["scaler"])
        self._size.load_state_dict(state["size"])
        self._seq, self.num_skipped = state["seq"], state["num_skipped"]
        self.num_recoveries, self.num_steps = state["num_recoveries"], state["num_steps"]
        self._graph_use.release()  # it was for another size
        if not state.get("graphs", True):
            self._graph_use.stop()

    @property
    def uses_graphs(self) -> bool:
        """Whether passes are replayed as CUDA graphs, once one has run eagerly; no more where that could not be."""
        return self._graph_use.is_on

    @property
    def micro_batch(self) -> int:
        """Samples of full length in a forward pass now; smaller after memory ran out."""
        return self._size.now

    @property
    def seq(self) -> int | None:
        """The full length in tokens; None until a batch is seen, where none was given."""
        return self._seq

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler of amp-fp16; that of a loop that has one may take its place before the first step."""
        return self._step.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler) -> None:
        self._step.scaler = scaler

    @property
    def loss_scale(self) -> float | None:
        """The GradScaler's scale; None without one."""
        return None if self._step.scaler is None else float(self._step.scaler.get_scale())

    def _gradients(self, batch: Batch, *, finishes: bool = True) -> torch.Tensor:
        """The window's gradients, however often it has to be begun again; gives its loss."""
        check_batch(batch)
        self._step.drop_gradients()
        attempts: list[str] = []
        self._state.keep()
        while isinstance(loss := self._try(batch, attempts, finishes=finishes), Failed):
            if not attempts:  # a pass that could not be captured runs eagerly now
                continue
            self.num_recoveries += 1
            self._size.trouble()
            if len(attempts) > SAME_SIZE_RETRIES:
                self._shrink(attempts)
                self._state.keep()  # checkpointing, where it was turned on, is to stay
        return loss

    def _try(self, batch: Batch, attempts: list[str], *, finishes: bool) -> torch.Tensor | Failed:
        """The loss of the window, whose gradients are made; where memory ran out, all is as before it."""

        def window() -> torch.Tensor:
            loss = self._window(batch, finishes=finishes)
            self._learn_state()
            self._step.finish(clips=finishes)
            return loss

        def see(error: BaseException) -> None:
            if isinstance(error, CannotCapture):
                warn_user(f"passes run eagerly, since they cannot be captured as CUDA graphs: {error}")
                return
            self.ranks.votes.report(error)
            attempts.append(f"micro-batch {self.micro_batch}: {str(error).splitlines()[0]}")
            if self.on_out_of_memory is not None:
                self.on_out_of_memory(error)

        def drop() -> None:
            self._step.forget()
            self._graph_use.stop()

        def recovers(e: BaseException) -> bool:
            return is_out_of_memory(e) or isinstance(e, CannotCapture)

        try:
            return self._state.attempt(window, recovers=recovers, see=see, drop=drop)
        except BaseException as error:
            self._step.forget()
            self.ranks.votes.give_up(error)
            raise

    def _learn_state(self) -> None:
        """The first window shows what state passes change: it is kept from now on, and said."""
        is_first = not self._state.is_known
        self._state.learn()
        if not is_first:
            return
        self._state.warn_of_splits()
        if self.uses_graphs and self._state.moves_in_python:
            warn_user("passes run eagerly: a replayed CUDA graph would not change what Python keeps")
            self._graph_use.stop()

    def _window(self, batch: Batch, *, finishes: bool) -> torch.Tensor:
        self._seq = self._seq or width_of(batch)
        if self._packs:
            batch = packing.without_padding(batch)
        loss = self._loss_for(batch if self._rehearsed is None else self._rehearsed)
        totals = loss.counts(batch)
        if not any(totals):
            raise WorkloadError(["the batch has no label that counts: all of them are ignored"])
        width = self._seq if "input_ids" in batch else width_of(batch)
        max_tokens = self.micro_batch * self._chosen.texts_per_sample * width
        graphs = self._graph_use.graphs_for(batch, loss, max_tokens=max_tokens, seq=self._seq)
        evenly = graphs is not None or (self._packs and compiling.is_applied(self.model))  # a short row compiles anew
        rows = self._chosen.rows(self.micro_batch, evenly=evenly) if self._packs else None
        parts, num_own = passes_of(batch, loss, max_tokens, self.ranks, rows)
        if not loss.splits and len(parts) * self.ranks.size > 1:
            problem = f"the loss of {type(self.model).__name__} is no mean over samples or labels, so no split gives it"
            raise WorkloadError([problem], hint=OWN_HINT)
        if graphs is not None:
            return graphs.accumulate(parts, loss, totals[0])
        mean = self._step.passes(parts, loss, totals, num_counted=num_own, finishes=finishes)
        self._graph_use.saw(self._step.with_gradients)
        return mean

    def _loss_for(self, batch: Batch) -> HeadLoss:
        """The user's, a module's own, or what the labels of a batch call for."""
        if self._reads_model and (self.loss is None or self.loss.joint is None):
            rows = telling_rows(batch)
            few = self._bring(take_rows(batch, rows, width_of(batch)))
            with untouched(self.model):
                found = own_loss(self.model, few, autocast=self._autocast)
            self.loss = found if found.takes_labels else None
            self._reads_model = len(rows) < 2  # one sample does not show what a mean is over
        return self.loss or head_loss(self.model, batch, self.task)

    def _commit_together(self, loss: torch.Tensor) -> torch.Tensor:
        """The step of all ranks, and their loss; where it fails on one, all stop."""
        try:
            taken = self._step.commit(self._room_bytes)
            self.num_steps += taken
            self.num_skipped += not taken
            if taken and self._scheduler is not None:
                self._scheduler.step()
            if self.ranks.size > 1:
                float(loss)  # what goes wrong on the device comes to light here
        except BaseException as error:
            self.ranks.votes.give_up(error)
            raise
        self.ranks.votes.agree()
        return self.ranks.total(loss)

    def _room_bytes(self) -> int:
        """Memory that the optimizer's step can use without raising the peak of the window."""
        if self._device.type != "cuda" or self._graph_use.passes is not None:  # whose graphs hold it
            return 0
        return torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)

    def _shrink(self, attempts: list[str]) -> None:
        """Go on with less: half the micro-batch, and for a single sample its layers computed twice."""
        if self.micro_batch == 1 and not checkpointing.turn_on(self.model):
            raise RecoveryExhausted(
                f"one sample of {self._seq} tokens does not fit, after {len(attempts)} tries",
                attempts=attempts,
                hint="free the GPU, shorten the sequences, or plan for what is there: vramfit plan",
            )
        self._size.shrink()
        del attempts[SAME_SIZE_RETRIES:]
