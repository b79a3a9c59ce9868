"""`Session`: everything that one process makes for a run: model, optimizer, stepper, and what becomes of them.

`Schedule` is the learning rate over a run: a warm-up, then a straight line, half a cosine, or a constant rate.
"""

import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vramfit.errors import WorkloadError
from vramfit.loader.budget import available_bytes
from vramfit.runtime.data.order import BatchOrder
from vramfit.runtime.inference import Inference
from vramfit.runtime.stepper import Stepper
from vramfit.runtime.training import events
from vramfit.runtime.training.checkpoints import Checkpoint
from vramfit.runtime.training.loop import Loop
from vramfit.runtime.training.outcome import settings_in_words
from vramfit.runtime.training.preparation import Run, load_model, load_source
from vramfit.runtime.training.progress import Journal
from vramfit.runtime.training.request import TrainRequest
from vramfit.runtime.training.saving import describe_head, put_together, save_model, source_fingerprint
from vramfit.runtime.training.state import learned_tensors, restore_learned
from vramfit.runtime.training.teacher import fingerprint
from vramfit.step.own_loss import full
from vramfit.step.splitting import Ranks
from vramfit.tasks.parts.losses import num_labelled, smoothed_loss
from vramfit.techniques import application, compiling
from vramfit.workload import Workload

if TYPE_CHECKING:
    from vramfit.runtime.training.mending import Mending


def make_optimizer(workload: Workload, model: torch.nn.Module, request: TrainRequest) -> torch.optim.Optimizer:
    """The optimizer over what learns: matrices with weight decay, biases and norms without."""
    optimizer = application.make_optimizer(model, workload, lr=request.lr)
    (group,) = optimizer.param_groups
    decayed = [p for p in group["params"] if p.dim() > 1]
    others = [p for p in group["params"] if p.dim() <= 1]
    settings = {name: value for name, value in group.items() if name not in ("params", "weight_decay")}
    made = ((decayed, request.weight_decay), (others, 0.0))
    optimizer.param_groups[:] = [
        {"params": params, **_own(settings), "weight_decay": decay} for params, decay in made if params
    ]
    return optimizer


def _own(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in settings.items()}


class Schedule:
    """Sets the learning rate of every group after each optimizer step.

    The rate is a function of the number of steps taken, so that a resumed run has the very same one.

    Args:
        warmup: below 1 a share of `num_steps`, from 1 on a number of steps.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, name: str, lr: float, num_steps: int, warmup: float
    ) -> None:
        self._optimizer = optimizer
        self._name = name
        self._base = lr
        self._total = max(num_steps, 1)
        self._warmup = int(warmup) if warmup >= 1 else math.ceil(warmup * num_steps)
        self.num_steps = 0
        self._set()

    @property
    def lr(self) -> float:
        """The rate of the next step."""
        return self._base * factor(self._name, self.num_steps, self._warmup, self._total)

    def step(self) -> None:
        """An optimizer step was taken."""
        self.num_steps += 1
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """For a resumed run."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a `state_dict` was taken."""
        self.num_steps = state["num_steps"]
        self._set()

    def _set(self) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # optimizers that are compiled keep it so
                group["lr"].fill_(self.lr)
            else:
                group["lr"] = self.lr


def factor(name: str, step: int, warmup: int, total: int) -> float:
    """What the learning rate is multiplied by at a step.

    >>> [round(factor("linear", n, 2, 6), 2) for n in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    if name == "constant":
        return 1.0
    share = min(1.0, (step - warmup) / max(total - warmup, 1))
    return 1.0 - share if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


EVALUATION_WITHOUT_PLAN = 32
"""Samples of full length in an evaluation batch, where nothing was planned."""

NUM_NAMED = 4
"""Weights that are named where many are new."""


class Session:
    """Everything that one process makes for a run."""

    def __init__(self, run: Run) -> None:
        self.run, self._processes, self._on_event = run, run.processes, run.on_event
        request, data, plan, workload = run.request, run.data, run.plan, run.workload
        self._journal: Journal | None = None
        self.notes: list[str] = []
        model, report = load_model(run)
        self._fresh = report.fresh
        if run.run_device.emulated is not None and self._processes.size > 1 and workload.parallel == "fsdp":
            raise WorkloadError(["device emulated cannot follow shards: take parallel ddp, or device cpu"])
        ranks = self._processes.share(model, workload.parallel)
        bucket = not workload.is_packed  # where there is no padding, like lengths need not meet
        order = BatchOrder.of(data.train, workload.batch, seed=request.seed, bucket=bucket)
        num_steps = request.max_steps or math.ceil(request.epochs * order.num_batches)
        optimizer = make_optimizer(workload, model, request)
        schedule = Schedule(optimizer, name=request.schedule, lr=request.lr, num_steps=num_steps, warmup=request.warmup)
        evaluation_batch = plan.evaluation_batch if plan is not None else EVALUATION_WITHOUT_PLAN
        seq = plan.workload.seq if plan is not None else workload.seq
        self.model, self.optimizer, self.order, self.num_steps = model, optimizer, order, num_steps
        self.schedule = schedule
        self.stepper = self._stepper(ranks)
        self.inference = Inference(
            model,
            run.run_device,
            max_tokens=evaluation_batch * seq,
            workload=workload,
            votes=self._processes.votes if self._processes.shards else None,
        )
        self.mending = self._mending()
        """What plans again where memory is not as planned; None where nothing does."""
        self.identity = {
            "request": request.as_data(),
            "data": data.train.fingerprint,
            "eval_data": data.evaluation.fingerprint if data.evaluation is not None else None,
            "source": source_fingerprint(data.resolved),
            "held_teacher": fingerprint(run.teacher) if workload.holds_teacher and run.teacher else None,
        }
        """What a checkpoint is known by: the request and the data's fingerprints."""
        self.compile_s = 0.0
        """Seconds before the first step that went into compiling and the rehearsal that had it done."""
        self._compile()
        is_captured = workload.captures_graphs and self.stepper.uses_graphs
        if (request.captures_graphs or workload.captures_graphs) and not is_captured:
            self._warn("passes are not captured: that is for packed ones in bfloat16 on a GPU, without checkpointing")

    def _mending(self) -> "Mending | None":
        """On a GPU, real or emulated, unless it is not wanted; ranks would have to be planned for one by one."""
        plan, request = self.run.plan, self.run.request
        if plan is None or not request.mend or self._processes.size > 1:
            return None
        from vramfit.runtime.training.mending import Mending

        return Mending(self, plan)

    def _compile(self) -> None:
        """Have the layers compiled when they first run, where that can be."""
        if not self.run.workload.is_compiled:
            return
        emulated = self.run.run_device.emulated is not None
        reason = "an emulated GPU has no compiler" if emulated else compiling.why_not(self.run.run_device.device)
        if reason is None:
            compiling.apply(self.model)
        else:
            self._warn(f"layers are not compiled: {reason}")

    def _warn(self, text: str) -> None:
        self.notes.append(text)
        self._on_event(events.Note(text=text[:1].upper() + text[1:] + ".", warns=True))

    def _stepper(self, ranks: Ranks | None) -> Stepper:
        w, smoothing = self.run.workload, self.run.request.label_smoothing
        stepper = Stepper(
            self.model,
            self.optimizer,
            replace(
                w,
                memory=self.run.limit_bytes,
                max_grad_norm=self.run.request.max_grad_norm,
                host_memory=w.host_memory if w.host_memory is not None else available_bytes(),
            ),
            scheduler=self.schedule,
            loss_fn=smoothed_loss(smoothing) if smoothing else None,
            count_fn=(lambda batch: num_labelled(batch["labels"])) if smoothing else None,
            ranks=ranks,
        )
        stepper.task = w.task
        return stepper

    def tell(self, event: events.Event) -> None:
        """Pass an event on, and write it down."""
        if self._journal is not None:
            self._journal.write(event)
        self._on_event(event)

    def rehearse(self, checkpoint: Checkpoint | None) -> None:
        """Try the largest batch there can be: the longest samples, in full micro-batches."""
        stepper = self.stepper
        if checkpoint is not None:
            state = self._processes.first(checkpoint.state)
            if self.mending is not None and state.get("mending") is not None:
                self.mending.load_state_dict(state["mending"])
            stepper.load_state_dict(state["stepper"])
        lengths = self.run.data.train.sample_lengths
        longest = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))[: self.run.workload.batch]
        batch = self.run.data.train.collate_samples(longest, seed=self.run.request.seed)
        began = time.perf_counter()
        try:
            with self.run.run_device.active():
                stepper.rehearse(batch)
        except Exception as error:
            if not compiling.has_failed(error):
                raise
            compiling.undo(self.model)
            self._warn(f"layers are not compiled: {' '.join(str(error).split())[:200]}")
            with self.run.run_device.active():
                stepper.rehearse(batch)
        if compiling.is_applied(self.model):
            self.compile_s = time.perf_counter() - began
            self._on_event(
                events.Note(text=f"Layers are compiled; that and the rehearsal took {self.compile_s:.0f} s.")
            )
        if stepper.micro_batch < (self.run.workload.micro_batch or 1) and checkpoint is None:
            self.notes.append(f"the rehearsal ran out of memory; micro-batches of {stepper.micro_batch} fit")
            self._on_event(events.Note(text=self.notes[-1].capitalize() + ".", warns=True))

    def start(self, loop: Loop) -> None:
        """Training is about to begin."""
        if self.mending is not None:
            self.mending.begin()
        if self._processes.leads:
            self._journal = Journal(Path(self.run.request.output), from_step=loop.progress.step)
        if self._fresh and loop.progress.step == 0:
            names = ", ".join(self._fresh[:NUM_NAMED]) + (", …" if len(self._fresh) > NUM_NAMED else "")
            text = f"Not in the checkpoint, and drawn with seed {self.run.request.seed}: {names}."
            self._on_event(events.Note(text=text))
        plan = self.run.plan
        self._on_event(
            events.Started(
                step=loop.progress.step,
                num_steps=self.num_steps,
                settings=settings_in_words(self.run.workload),
                budget_bytes=self.run.limit_bytes if plan is None else plan.budget_bytes,
            )
        )

    def end(self) -> None:
        """No more events to write down."""
        if self._journal is not None:
            self._journal.close()

    def save(self, loop: Loop, output: Path) -> None:
        """The best weights, or the last ones where nothing was evaluated, as a model."""
        model, best = self.model, loop.progress.best_step
        thresholds = loop.progress.metrics_at(best).get("thresholds")
        if best is not None and best != loop.progress.step:
            checkpoint = self._processes.first(lambda: self.run.store.at(best))
            if checkpoint is None:
                self.notes.append(f"the best checkpoint, of step {best}, is damaged: the last weights were saved")
                self._on_event(events.Note(text=self.notes[-1], warns=True))
                thresholds = loop.progress.metrics_at(loop.progress.step).get("thresholds")
            else:
                restore_learned(model, self._processes.first_tensors(lambda: checkpoint.tensors("weights")))
        if self.run.workload.is_quantized:
            self.notes.append("weights that were quantized did not learn: saved as the source has them")
        describe_head(model.config, self.run.data.train, thresholds)
        whole = {name: full(p).cpu() for name, p in learned_tensors(model).items()} if self._processes.shards else {}
        source = partial(load_source, self.run)
        self._processes.first(
            lambda: save_model(
                put_together(source(), whole, model.config) if whole else model,
                self.run.data.tokenizer,
                output,
                load_source=source,
                max_length=self.run.data.max_length,
            )
        )
