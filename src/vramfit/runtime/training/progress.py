"""`Progress`: how far a run has come; part of every checkpoint."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import VramfitError
from vramfit.records.codec import from_data, replace_file, to_data, to_json
from vramfit.records.run import COURSE_FILE, EvaluationResult
from vramfit.runtime.training.events import Evaluated, Event, HistoryKept, Stepped

MAX_SKIPPED = 20
"""fp16 windows without a step, one after another: the scale halves at each, and would be 2⁻⁴ of one by then."""


class Diverged(VramfitError):
    """Training has left the numbers; the last checkpoint is from before."""


class Divergence:
    """Counts what is not finite, and ends a run that does not come back.

    Args:
        scales: whether a GradScaler skips steps that overflow; elsewhere a loss that is no number has reached the
            weights already.
    """

    def __init__(self, *, scales: bool) -> None:
        self.num_nonfinite = 0
        """Batches whose loss was infinite or no number."""
        self.num_skipped_in_a_row = 0
        self._scales = scales

    def see(self, step: int, loss: float, *, skipped: bool) -> Diverged | None:
        """One batch went through; gives the error to end with, where the run does not come back."""
        self.num_nonfinite += not math.isfinite(loss)
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        if not self._scales and not math.isfinite(loss):
            return Diverged(f"the loss of step {step:,} is {loss}: training has diverged", hint=ADVICE)
        if self.num_skipped_in_a_row >= MAX_SKIPPED:
            return Diverged(
                f"{MAX_SKIPPED} steps in a row, up to step {step:,}, overflowed in fp16 and were skipped",
                hint=f"take precision amp-bf16 or fp32; {ADVICE}",
            )
        return None

    def check_weights(self, step: int, parameters: Sequence[torch.Tensor]) -> None:
        """Before a checkpoint is written.

        Raises:
            Diverged: weights that are not finite, which no checkpoint should have.
        """
        # sums need no memory of their own, and what is not finite stays so in them
        sums = [p.detach().sum(dtype=torch.float32) for p in parameters]
        if not torch.stack(sums).isfinite().all():
            raise Diverged(f"weights are no longer finite after step {step:,}: training has diverged", hint=ADVICE)

    def state_dict(self) -> dict[str, int]:
        """For a resumed run."""
        return {"num_nonfinite": self.num_nonfinite, "num_skipped_in_a_row": self.num_skipped_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a `state_dict` was taken."""
        self.num_nonfinite, self.num_skipped_in_a_row = state["num_nonfinite"], state["num_skipped_in_a_row"]


ADVICE = (
    "start anew with a lower learning rate (a third), a longer warm-up or max_grad_norm 1; the checkpoints that are "
    "there are from before"
)


NAME = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Journal:
    """Writes what happened.

    Args:
        folder: of the run.
        from_step: what an earlier session wrote beyond this step is left out: it is done again.
    """

    def __init__(self, folder: Path, *, from_step: int) -> None:
        self._folder = folder
        self._path = folder / NAME
        _cut(self._path, from_step)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._board = _tensorboard(folder / TENSORBOARD, from_step)

    def write(self, event: Event) -> None:
        """Note a step, its course or an evaluation; other events are no figures."""
        if isinstance(event, Stepped):
            names = ("epoch", "loss", "lr", "tokens_per_s", "num_skipped", "num_recoveries", "num_nonfinite")
            more = ("loss_scale", "micro_batch", "reserved_bytes")
            self._line("train", event.step, {name: getattr(event, name) for name in (*names, *more)})
        elif isinstance(event, Evaluated):
            self._line("eval", event.result.step, {"epoch": event.result.epoch, **event.result.metrics})
        elif isinstance(event, HistoryKept):
            with suppress(VramfitError):  # a full disk: the next checkpoint says so
                replace_file(self._folder / COURSE_FILE, (to_json(event.course) + "\n").encode())

    def _line(self, kind: str, step: int, values: dict[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with suppress(OSError):  # a full disk: the next checkpoint says so, with what to do
            self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    with suppress(OSError):
                        self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Finish the files."""
        with suppress(OSError):
            self._file.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()


def _cut(path: Path, from_step: int) -> None:
    """Keep the lines of steps up to one; a line that a kill left half is not kept."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= from_step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    replace_file(path, "".join(f"{line}\n" for line in kept).encode())


def _tensorboard(folder: Path, from_step: int) -> Any:
    """A writer of TensorBoard's; None where it is not installed, or does not work: a run can do without."""
    try:
        module = import_module("torch.utils.tensorboard")
        return module.SummaryWriter(str(folder), purge_step=from_step + 1)
    except Exception:  # it fails in many ways beside its protobuf
        return None


NUM_RECENT = 50
"""Losses whose mean is shown, at most."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """Where a run is, and what it has seen."""

    step: int = 0
    """Batches learned from."""
    epoch: int = 0
    """The epoch of the next batch."""
    index: int = 0
    """The next batch in it."""
    num_tokens: int = 0
    time_s: float = 0.0
    compile_s: float = 0.0
    """Seconds of compiling before first steps, of all sessions together."""
    num_sessions: int = 0
    losses: list[float] = field(default_factory=list)
    """The last ones."""
    evaluations: list[EvaluationResult] = field(default_factory=list)
    best_value: float | None = None
    best_loss: float = math.inf
    """Decides between evaluations of the same value."""
    best_step: int | None = None
    num_without_better: int = 0
    """Evaluations since the best one."""

    def learned(self, num_tokens: int, num_batches: int) -> None:
        """One more batch is done, of an epoch of `num_batches`; its loss may not be known yet."""
        self.step += 1
        self.num_tokens += num_tokens
        self.index += 1
        if self.index >= num_batches:
            self.epoch, self.index = self.epoch + 1, 0

    def lost(self, loss: float) -> None:
        """The loss of the next batch that had none."""
        self.losses = [*self.losses[-(NUM_RECENT - 1) :], loss]

    def epochs(self, num_batches: int) -> float:
        """Passes over the data so far."""
        return round(self.epoch + self.index / max(num_batches, 1), 4)

    def evaluated(self, epochs: float, metrics: dict[str, Any], value: float, *, higher: bool, time_s: float) -> None:
        """Note an evaluation, and whether it is the best."""
        loss = float(metrics.get("loss", 0.0))
        best = not math.isnan(value) and (
            self.best_value is None
            or (value > self.best_value if higher else value < self.best_value)
            or (value == self.best_value and loss < self.best_loss)
        )
        if best:
            self.best_value, self.best_loss, self.best_step, self.num_without_better = value, loss, self.step, 0
        else:
            self.num_without_better += 1
        self.evaluations.append(
            EvaluationResult(step=self.step, epoch=epochs, metrics=metrics, time_s=time_s, is_best=best)
        )

    def metrics_at(self, step: int | None) -> Mapping[str, Any]:
        """What was found of the weights of a step; nothing where they were not evaluated."""
        return next((e.metrics for e in reversed(self.evaluations) if e.step == step), {})

    @property
    def is_evaluated(self) -> bool:
        """Whether the weights of this step have been."""
        return bool(self.evaluations) and self.evaluations[-1].step == self.step

    def last_losses(self, num_batches: int) -> list[float]:
        """Of the last batches, no more than the `num_batches` of an epoch; those that are numbers."""
        return [loss for loss in self.losses[-max(num_batches, 1) :] if math.isfinite(loss)]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**asdict(self), "evaluations": to_data(self.evaluations)}

    @staticmethod
    def from_state(state: dict[str, Any]) -> "Progress":
        """Where a `state_dict` was taken."""
        evaluations = [from_data(EvaluationResult, item) for item in state["evaluations"]]
        return Progress(**{**state, "evaluations": evaluations})
