"""What a run tells while it goes: small records for whoever shows them."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from vramfit.errors import VramfitError
from vramfit.records.run import EvaluationResult, StepCourse

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(VramfitError):
    """Ctrl-C: the run has ended; what it had learned is in a checkpoint."""

    exit_code = 128 + signal.SIGINT


class Terminated(Interrupted):
    """The system asked the run to end; what it had learned is in a checkpoint."""

    exit_code = 128 + signal.SIGTERM


class StopRequest:
    """Whether a signal has come, and which.

    Args:
        resumes: whether the run goes on with an earlier one.
    """

    def __init__(self, *, resumes: bool = False) -> None:
        self.number: int | None = None
        self._resumes = resumes
        self._is_training = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler: in training the first signal is noted; a second one, or any before, ends the run at once."""
        at_once = not self._is_training or self.number is not None
        self.number = number
        if at_once:
            raise KeyboardInterrupt

    def begin_training(self) -> None:
        """From here on a signal waits for the end of a step.

        Raises:
            KeyboardInterrupt: a signal has come that some library kept to itself.
        """
        self.check()
        self._is_training = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come: libraries may swallow the one that the handler raised."""
        if self.number is not None:
            raise KeyboardInterrupt

    @property
    def came_early(self) -> bool:
        """Whether a signal came before the first step."""
        return self.number is not None and not self._is_training

    def error(self, step: int) -> Interrupted:
        """What to raise once the checkpoint of a step is written."""
        return self._error(f"after step {step:,}; its checkpoint is saved", can_resume=True)

    def early_error(self) -> Interrupted:
        """What to raise where a signal came before the first step."""
        if self._resumes:
            return self._error("before going on: nothing new was trained, the run is as it was", can_resume=True)
        return self._error("before the first step: nothing was trained yet", can_resume=False)

    def _error(self, what: str, *, can_resume: bool) -> Interrupted:
        kind = Terminated if self.number == signal.SIGTERM else Interrupted
        word = "Terminated" if self.number == signal.SIGTERM else "Interrupted"
        hint = "go on from there: the same command with --resume (resume=True)" if can_resume else None
        return kind(f"{word} {what}", hint=hint)


@contextmanager
def stop_request(*, resumes: bool = False) -> Iterator[StopRequest]:
    """Inside, Ctrl-C and SIGTERM are handled; outside the main thread none arrives.

    Args:
        resumes: whether the run goes on with an earlier one.

    Raises:
        Interrupted: one came before the first step.
    """
    request = StopRequest(resumes=resumes)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    usual: dict[signal.Signals, Any] = {number: signal.signal(number, request) for number in SIGNALS}
    try:
        yield request
    except KeyboardInterrupt:
        if not request.came_early:
            raise
        raise request.early_error() from None
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


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
class HistoryKept:
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


Event = Note | Loading | Started | Stepped | HistoryKept | Evaluating | Evaluated | Saved
OnEvent = Callable[[Event], None]
