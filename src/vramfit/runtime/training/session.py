"""`Session`: everything that one process makes for a run: model, optimizer, stepper, and what becomes of them."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.loader.budget import available_bytes
from vramfit.loader.load import load_request
from vramfit.loader.request import make_request
from vramfit.records.plan import Plan
from vramfit.runtime.data.samples import BatchOrder
from vramfit.runtime.distributed.company import Company
from vramfit.runtime.inference import Inference
from vramfit.runtime.stepper import Stepper
from vramfit.runtime.training import events
from vramfit.runtime.training.checkpoints import Checkpoint, CheckpointStore
from vramfit.runtime.training.loop import Loop, Parts
from vramfit.runtime.training.outcome import settings_in_words
from vramfit.runtime.training.place import Place
from vramfit.runtime.training.preparation import Data, load_model, name_labels, source_fingerprint
from vramfit.runtime.training.progress import Journal
from vramfit.runtime.training.request import TrainRequest
from vramfit.runtime.training.saving import put_together, save_model
from vramfit.runtime.training.schedule import Schedule, make_optimizer
from vramfit.runtime.training.state import learned_tensors, restore_learned
from vramfit.step.own_loss import full
from vramfit.step.ranks import Ranks
from vramfit.tasks.parts.losses import num_labelled, smoothed_loss
from vramfit.techniques import compiling
from vramfit.units import parse_bytes
from vramfit.workload import Workload

EVALUATION_WITHOUT_PLAN = 32
"""Samples of full length in an evaluation batch, where nothing was planned."""

NUM_NAMED = 4
"""Weights that are named where many are new."""


class Session:
    """Everything that one process makes for a run."""

    def __init__(
        self,
        request: TrainRequest,
        data: Data,
        place: Place,
        plan: Plan | None,
        workload: Workload,
        store: CheckpointStore,
        on_event: events.OnEvent,
        us: Company | None = None,
    ) -> None:
        self._us = us if us is not None else Company()
        self._request, self._data, self._place, self._workload = request, data, place, workload
        self._on_event = on_event
        self._journal: Journal | None = None
        self.notes: list[str] = []
        limit_bytes = _limit(request, place, plan)
        model, report = load_model(request, data, workload, place, limit_bytes, self._loading)
        self._fresh = report.fresh
        if place.emulated is not None and self._us.size > 1 and workload.parallel == "fsdp":
            raise WorkloadError(["device emulated cannot follow shards: take parallel ddp, or device cpu"])
        ranks = self._us.share(model, workload.parallel)
        bucket = not workload.is_packed  # where there is no padding, like lengths need not meet
        order = BatchOrder(data.train.lengths, workload.batch, seed=request.seed, bucket=bucket)
        num_steps = request.max_steps or math.ceil(request.epochs * order.num_batches)
        optimizer = make_optimizer(workload, model, request)
        schedule = Schedule(optimizer, name=request.schedule, lr=request.lr, num_steps=num_steps, warmup=request.warmup)
        evaluation_batch = plan.evaluation_batch if plan is not None else EVALUATION_WITHOUT_PLAN
        seq = plan.workload.seq if plan is not None else workload.seq
        self.parts = Parts(
            request=request,
            train=data.train,
            evaluation=data.evaluation,
            order=order,
            num_steps=num_steps,
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            stepper=self._stepper(model, optimizer, schedule, limit_bytes, ranks),
            inference=Inference(
                model,
                place,
                max_tokens=evaluation_batch * seq,
                precision=workload.precision,
                votes=self._us.accord if self._us.shards else None,
            ),
            place=place,
            store=store,
            us=self._us,
            identity={
                "request": request.as_data(),
                "data": data.train.fingerprint,
                "eval_data": data.evaluation.fingerprint if data.evaluation is not None else None,
                "source": source_fingerprint(data.resolved),
            },
        )
        self._budget_bytes = plan.budget_bytes if plan is not None else limit_bytes
        self.compile_s = 0.0
        """Seconds before the first step that went into compiling and the rehearsal that had it done."""
        self._compile()
        if (request.graphs or workload.captures_graphs) and not (
            workload.captures_graphs and self.parts.stepper.records
        ):
            self._warn("passes are not recorded: that is for packed ones in bfloat16 on a GPU, without checkpointing")

    def _compile(self) -> None:
        """Have the layers compiled when they first run, where that can be."""
        if not self._workload.is_compiled:
            return
        emulated = self._place.emulated is not None
        reason = "an emulated GPU has no compiler" if emulated else compiling.why_not(self._place.device)
        if reason is None:
            compiling.apply(self.parts.model)
        else:
            self._warn(f"layers are not compiled: {reason}")

    def _warn(self, text: str) -> None:
        self.notes.append(text)
        self._on_event(events.Note(text=text[:1].upper() + text[1:] + ".", warns=True))

    def _stepper(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        limit_bytes: int | None,
        ranks: Ranks | None,
    ) -> Stepper:
        w, smoothing = self._workload, self._request.label_smoothing
        stepper = Stepper(
            model,
            optimizer,
            replace(
                w,
                memory=limit_bytes,
                max_grad_norm=self._request.max_grad_norm,
                host_memory=w.host_memory if w.host_memory is not None else available_bytes(),
            ),
            scheduler=schedule,
            loss_fn=smoothed_loss(smoothing) if smoothing else None,
            count_fn=(lambda batch: num_labelled(batch["labels"])) if smoothing else None,
            ranks=ranks,
        )
        stepper.task = w.task
        return stepper

    def _loading(self, done_bytes: int, total_bytes: int) -> None:
        self._on_event(events.Loading(done_bytes=done_bytes, total_bytes=total_bytes))

    def tell(self, event: events.Event) -> None:
        """Pass an event on, and write it down."""
        if self._journal is not None:
            self._journal.write(event)
        self._on_event(event)

    def rehearse(self, checkpoint: Checkpoint | None) -> None:
        """Try the dearest batch there can be: the longest samples, in full micro-batches."""
        stepper = self.parts.stepper
        if checkpoint is not None:
            stepper.load_state_dict(self._us.first(checkpoint.state)["stepper"])
        lengths = self._data.train.lengths
        longest = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))[: self._workload.batch]
        batch = self._data.train.collate(longest)
        began = time.perf_counter()
        try:
            with self._place.active():
                stepper.rehearse(batch)
        except Exception as error:
            if not compiling.has_failed(error):
                raise
            compiling.undo(self.parts.model)
            self._warn(f"layers are not compiled: {' '.join(str(error).split())[:200]}")
            with self._place.active():
                stepper.rehearse(batch)
        if compiling.is_applied(self.parts.model):
            self.compile_s = time.perf_counter() - began
            self._on_event(
                events.Note(text=f"Layers are compiled; that and the rehearsal took {self.compile_s:.0f} s.")
            )
        if stepper.micro_batch < (self._workload.micro_batch or 1) and checkpoint is None:
            self.notes.append(f"the rehearsal ran out of memory; micro-batches of {stepper.micro_batch} fit")
            self._on_event(events.Note(text=self.notes[-1].capitalize() + ".", warns=True))

    def start(self, loop: Loop) -> None:
        """Training is about to begin."""
        if self._us.leads:
            self._journal = Journal(Path(self._request.output), from_step=loop.progress.step)
        if self._fresh and loop.progress.step == 0:
            names = ", ".join(self._fresh[:NUM_NAMED]) + (", …" if len(self._fresh) > NUM_NAMED else "")
            text = f"Not in the checkpoint, and drawn with seed {self._request.seed}: {names}."
            self._on_event(events.Note(text=text))
        self._on_event(
            events.Started(
                step=loop.progress.step,
                num_steps=self.parts.num_steps,
                settings=settings_in_words(self._workload),
                budget_bytes=self._budget_bytes,
            )
        )

    def end(self) -> None:
        """No more events to write down."""
        if self._journal is not None:
            self._journal.close()

    def save(self, loop: Loop, output: Path) -> None:
        """The best weights, or the last ones where nothing was evaluated, as a model."""
        model, best = self.parts.model, loop.progress.best_step
        if best is not None and best != loop.progress.step:
            checkpoint = self._us.first(lambda: self.parts.store.at(best))
            if checkpoint is None:
                self.notes.append(f"the best checkpoint, of step {best}, is damaged: the last weights were saved")
                self._on_event(events.Note(text=self.notes[-1], warns=True))
            else:
                restore_learned(model, self._us.first_tensors(lambda: checkpoint.tensors("weights")))
        if self._workload.is_quantized:
            self.notes.append(
                f"weights that were {self._workload.quantize} did not learn: saved as the source has them"
            )
        whole = {name: full(p).cpu() for name, p in learned_tensors(model).items()} if self._us.shards else {}
        load_source = self._load_source()
        self._us.first(
            lambda: save_model(
                put_together(load_source(), whole) if whole else model,
                self._data.tokenizer,
                output,
                load_source=load_source,
            )
        )

    def _load_source(self) -> Callable[[], Any]:
        request, w = self._request, self._workload

        def load() -> Any:
            asked = make_request(
                request.model,
                task=request.task,
                precision=w.precision,
                num_labels=w.num_labels,
                device="cpu",
                trust_remote_code=request.trust_remote_code,
                seed=request.seed,
            )
            model, _ = load_request(asked)
            name_labels(model, self._data.train.label_names)
            return model

        return load


def _limit(request: TrainRequest, place: Place, plan: Plan | None) -> int | None:
    """What PyTorch may reserve: the plan's limit, and what this process held on the device before."""
    if plan is not None:
        return min(plan.budget_bytes, plan.limit_bytes + place.held_bytes)
    if place.has_budget and request.memory is not None:
        return parse_bytes(request.memory, name="memory")
    return None
