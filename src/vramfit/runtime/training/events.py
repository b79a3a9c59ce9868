"""What a run tells while it goes: small records for whoever shows them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vramfit.records.run import EvaluationResult, StepCourse


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something to know, in words."""

    text: str
    warns: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Bytes of the checkpoint that have been read."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Training begins, or goes on."""

    step: int
    num_steps: int
    settings: str
    """How it runs, in words."""
    budget_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """One effective batch was learned from."""

    step: int
    num_steps: int
    epoch: float
    loss: float
    lr: float
    tokens_per_s: float
    num_skipped: int
    num_recoveries: int
    num_nonfinite: int
    loss_scale: float | None
    micro_batch: int
    reserved_bytes: int | None
    """The reserved peak so far; None on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A step was written down request by request."""

    course: StepCourse


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluating:
    """Samples of an evaluation that are done."""

    num_done: int
    num_samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """An evaluation is done."""

    result: EvaluationResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint, or the model, is on the disk."""

    folder: Path
    step: int
    final: bool = False


Event = Note | Loading | Started | Stepped | Recorded | Evaluating | Evaluated | Saved
OnEvent = Callable[[Event], None]
