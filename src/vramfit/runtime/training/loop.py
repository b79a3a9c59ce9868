"""The loop: epochs of effective batches, evaluations and checkpoints between them, an end that is known beforehand."""

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vramfit.records.run import Status
from vramfit.runtime.data.samples import Samples, make_metrics
from vramfit.runtime.training.checkpoints import Checkpoint
from vramfit.runtime.training.events import Evaluated, Evaluating, HistoryKept, Saved, Stepped, StopRequest
from vramfit.runtime.training.outcome import MemoryHistory
from vramfit.runtime.training.progress import Divergence, Progress
from vramfit.runtime.training.state import (
    learned_tensors,
    optimizer_state,
    random_tensors,
    random_values,
    restore_learned,
    restore_optimizer,
    restore_random,
    seed_everything,
    whole,
)
from vramfit.step.own_loss import local
from vramfit.step.plain import Batch
from vramfit.step.recovery import RandomState
from vramfit.step.splitting import lengths_of, share_out
from vramfit.tasks.base import IGNORED
from vramfit.tasks.parts.losses import attended
from vramfit.techniques import packing

if TYPE_CHECKING:
    from vramfit.runtime.training.session import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """A step that the device may still be computing, and what was true when it was taken."""

    step: int
    epoch: float
    began: float
    num_tokens: int
    lr: float
    skipped: bool
    loss: torch.Tensor | None
    """None where no label of the batch counts."""


class _EvaluationStopped(Exception):
    """A signal came while an evaluation went on."""


class Loop:
    """Trains from wherever `progress` is to the end."""

    def __init__(self, session: "Session", stop: StopRequest) -> None:
        self.progress = Progress()
        self.divergence = Divergence(scales=session.stepper.loss_scale is not None)
        self._session = session
        self._stop = stop
        self._on_event = session.tell
        self._saved_step = -1
        self._history = MemoryHistory(session.run.run_device, session.run.workload.texts_per_sample)
        self._taken: _Taken | None = None
        """The last step, while its loss has not been read."""
        self._read_at = 0.0

    def restore(self, checkpoint: Checkpoint) -> None:
        """Be where a checkpoint was written."""
        p, processes = self._session, self._session.run.processes
        state = processes.first(checkpoint.state)
        restore_learned(p.model, processes.first_tensors(lambda: checkpoint.tensors("weights")))
        moments = processes.first_tensors(lambda: checkpoint.tensors("optimizer"))
        restore_optimizer(p.model, p.optimizer, moments, state["optimizer"], host=p.stepper.host)
        p.schedule.load_state_dict(state["schedule"])
        p.stepper.load_state_dict(state["stepper"])
        self.divergence.load_state_dict(state["watch"])
        self.progress = Progress.from_state(state["progress"])
        self._restore_generators(checkpoint, state)
        self._saved_step = checkpoint.step

    def _restore_generators(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        """Where they were, on every rank that was there; on others, begun anew."""
        processes, others = self._session.run.processes, state.get("other_ranks", [])
        for rank in range(processes.size):
            values = state["random"] if rank == 0 else others[rank - 1] if rank <= len(others) else None
            read = partial(checkpoint.tensors, _generators(rank))
            found = None if values is None else processes.first_tensors(read)
            if processes.rank != rank:
                continue
            if found is None or values is None:
                seed_everything(self._session.run.request.seed + checkpoint.step * processes.size + rank)
            else:
                restore_random(found, values)

    def run(self) -> Status:
        """Train to the end, or until an evaluation says that more is no use.

        Raises:
            Interrupted: a signal came; the checkpoint is written.
            Diverged: losses or weights are no longer numbers.
            RecoveryExhausted: not even one sample fits.
            VramfitError: a checkpoint could not be written.
        """
        p, progress = self._session, self.progress
        progress.num_sessions += 1
        batches = p.order.epoch(progress.epoch)
        epoch = progress.epoch
        if progress.step and not progress.is_evaluated:
            self._evaluate_where_due()  # a signal came before it was done
        while progress.step < p.num_steps and not self._is_enough():
            if progress.epoch != epoch:
                epoch, batches = progress.epoch, p.order.epoch(progress.epoch)
            self._learn(batches[progress.index], epoch, len(batches))
            if p.mending is not None:
                p.mending.after_step(progress.step)
            self._after_step(is_end_of_epoch=progress.index == 0)
        if p.run.data.evaluation is not None and not progress.is_evaluated:
            self._evaluate(p.run.data.evaluation)
        self._save()
        return "stopped early" if progress.step < p.num_steps else "completed"

    def _is_enough(self) -> bool:
        patience = self._session.run.request.patience
        return patience is not None and self.progress.num_without_better >= patience

    def _learn(self, samples: list[int], epoch: int, num_batches: int) -> None:
        """One step. A GPU's loss is read when the next step has been sent: so it need not wait for the host."""
        p, stepper, progress, began = self._session, self._session.stepper, self.progress, time.perf_counter()
        if self._taken is None:
            self._read_at = began
        batch = p.run.data.train.collate_samples(samples, epoch=epoch, seed=p.run.request.seed)
        lr, skipped_before = p.schedule.lr, stepper.num_skipped
        loss = self._step(batch) if _has_labels(batch) else None
        mask = batch.get("attention_mask")
        num_tokens = batch["input_ids"].numel() if mask is None else int(attended(mask).sum())
        progress.learned(num_tokens, num_batches)
        taken = _Taken(
            step=progress.step,
            epoch=progress.epochs(num_batches),
            began=began,
            num_tokens=num_tokens,
            lr=lr,
            skipped=stepper.num_skipped > skipped_before,
            loss=loss,
        )
        self._read_loss(next_is_sent=True)
        self._taken = taken
        if not p.run.run_device.computes_apart:
            self._read_loss()

    def _read_loss(self, *, next_is_sent: bool = False) -> None:
        """Read the loss of the last step, and tell of it.

        A step's time is from one reading to the next; where no step has been sent after it, it is its own.
        """
        p, stepper, taken = self._session, self._session.stepper, self._taken
        if taken is None:
            return
        self._taken = None
        loss = math.nan if taken.loss is None else float(taken.loss)
        now = time.perf_counter()
        since, self._read_at = self._read_at, now
        self.progress.time_s += now - since
        time_s = now - (since if next_is_sent else taken.began)
        self.progress.lost(loss)
        diverged = None if taken.loss is None else self.divergence.see(taken.step, loss, skipped=taken.skipped)
        memory = p.run.run_device.read()
        if p.mending is not None:
            p.mending.saw(memory.num_retries, time_s, taken.num_tokens)
        self._on_event(
            Stepped(
                step=taken.step,
                num_steps=p.num_steps,
                epoch=taken.epoch,
                loss=loss,
                lr=taken.lr,
                tokens_per_s=taken.num_tokens / max(time_s, 1e-9),
                num_skipped=stepper.num_skipped,
                num_recoveries=stepper.num_recoveries,
                num_nonfinite=self.divergence.num_nonfinite,
                loss_scale=stepper.loss_scale,
                micro_batch=stepper.micro_batch,
                reserved_bytes=memory.peak_reserved_bytes,
            )
        )
        if diverged is not None:
            raise diverged

    def _step(self, batch: Batch) -> torch.Tensor:
        """One step, written down where it is the largest so far and memory did not run out in it.

        A step whose passes are replayed asks for nothing, and is not.
        """
        p, stepper = self._session, self._session.stepper
        if stepper.uses_graphs:
            with p.run.run_device.active():
                return stepper.advance(batch)
        num_rows, seq = batch["input_ids"].shape
        num_samples = num_rows // self._history.texts
        micro_batch = min(num_samples, max(stepper.micro_batch * (stepper.seq or seq) // seq, 1))
        lengths: tuple[int, ...] = ()
        if packing.is_applied(stepper.model):
            lengths = tuple(lengths_of(batch, packs=True))
            micro_batch, seq = stepper.micro_batch, stepper.seq or seq
        recoveries_before = stepper.num_recoveries
        history = self._history.step(self.progress.step + 1, num_samples, micro_batch, seq, lengths)
        with history as courses, p.run.run_device.active():
            loss = stepper.advance(batch)
        if courses and stepper.num_recoveries == recoveries_before:
            self._on_event(HistoryKept(course=courses[0]))
        return loss

    def _after_step(self, *, is_end_of_epoch: bool) -> None:
        p, step = self._session, self.progress.step
        due = self._evaluate_where_due()
        saves = p.run.request.save_every
        if (step % saves == 0) if saves is not None else (due or is_end_of_epoch):
            self._save()
        (number,) = p.run.processes.votes.agree(self._stop.number or 0)
        if number and step < p.num_steps:
            self._stop.number = number
            self._save()
            raise self._stop.error(step)

    def _evaluate_where_due(self) -> bool:
        """Evaluate, if it is time to; says whether it is. A signal that comes meanwhile does not wait for the end."""
        p, step = self._session, self.progress.step
        every = p.run.request.eval_every
        due = step >= p.num_steps or (step % every == 0 if every is not None else self.progress.index == 0)
        if p.run.data.evaluation is not None and due:
            try:
                self._evaluate(p.run.data.evaluation)
            except _EvaluationStopped:
                self._save()
                raise self._stop.error(step) from None
        return due

    def _tell_evaluating(self, done: int, total: int) -> None:
        alone = self._session.run.processes.size == 1  # several processes stop together, between steps
        if alone and self._stop.number is not None and self.progress.step < self._session.num_steps:
            raise _EvaluationStopped
        self._on_event(Evaluating(num_done=done, num_samples=total))

    def _evaluate(self, samples: Samples) -> None:
        """Metrics of the weights as they are; the best ones are saved at once."""
        self._read_loss()
        started = time.perf_counter()
        metrics, processes = make_metrics(samples), self._session.run.processes
        own = None  # a model in shards is passed through by all together
        if processes.size > 1 and not processes.shards:
            own = share_out(samples.lengths, processes.size)[processes.rank]
        if own is None or own:
            self._session.inference.run(
                samples,
                lambda output, batch, rows: metrics.update(output, batch, [samples.references[i] for i in rows]),
                self._tell_evaluating,
                rows=own,
            )
        self._session.stepper.ranks.rest()
        if own is not None:
            metrics, *others = processes.gather(metrics)
            for other in others:
                metrics.merge(other)
        result = processes.first(metrics.result)
        time_s = time.perf_counter() - started
        progress = self.progress
        progress.time_s += time_s
        progress.evaluated(
            progress.epochs(self._session.order.num_batches),
            result,
            float(result[metrics.best_metric]),
            higher=metrics.higher_is_better,
            time_s=time_s,
        )
        self._on_event(Evaluated(result=progress.evaluations[-1]))
        if progress.best_step == progress.step:
            self._save()

    def _save(self) -> None:
        """A checkpoint of this moment, unless there is one."""
        p, progress = self._session, self.progress
        self._read_loss()
        if self._saved_step == progress.step:
            return
        learned = [local(q.detach()) for group in p.optimizer.param_groups for q in group["params"]]
        self.divergence.check_weights(progress.step, learned)
        p.run.processes.votes.agree()
        tensors, scalars = optimizer_state(p.model, p.optimizer, p.stepper.host)
        generators = p.run.processes.gather(RandomState.now())
        state = {
            **p.identity,
            "optimizer": scalars,
            "schedule": p.schedule.state_dict(),
            "stepper": p.stepper.state_dict(),
            "watch": self.divergence.state_dict(),
            "mending": None if p.mending is None else p.mending.state_dict(),
            "progress": progress.state_dict(),
            "random": random_values(generators[0]),
            "other_ranks": [random_values(g) for g in generators[1:]],
        }
        weights = {name: whole(tensor) for name, tensor in learned_tensors(p.model).items()}
        files = {"weights": weights, "optimizer": tensors}
        files |= {_generators(rank): random_tensors(g) for rank, g in enumerate(generators)}
        saved = p.run.processes.first(lambda: p.run.store.save(progress.step, files, state, best=progress.best_step))
        self._saved_step = progress.step
        self._on_event(Saved(folder=saved.folder, step=progress.step))


def _generators(rank: int) -> str:
    """The file of a rank's random generators."""
    return "random" if rank == 0 else f"random-{rank}"


def _has_labels(batch: Batch) -> bool:
    """Whether there is anything to learn: masking may have left a small batch without a label."""
    labels = batch.get("labels")
    return labels is None or labels.is_floating_point() or bool((labels != IGNORED).any())
