"""`Progress`: how far a run has come; part of every checkpoint."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from vramfit.records.codec import from_data, to_data
from vramfit.records.run import EvaluationResult

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
