"""`Recording`: whether the passes of a `Stepper` are recorded, from when on, and until when."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from vramfit.models.anatomy import max_positions
from vramfit.runtime.graphs import Recorder, fixed_state
from vramfit.step.inputs import Batch
from vramfit.tasks.parts.losses import HeadLoss
from vramfit.techniques import compiling


class Recording:
    """A pass that ran as it is shows what learns; passes of the same model are recorded from then on.

    Args:
        model, autocast: of the passes.
        is_on: whether they are recorded at all.
    """

    def __init__(
        self, model: torch.nn.Module, autocast: Callable[[], AbstractContextManager[Any]], *, is_on: bool
    ) -> None:
        self.is_on = is_on
        self.is_paused = False
        """Whether passes run as they are for now."""
        self.has_stopped = False
        """Whether memory was short, or something could not be recorded: the state of a run says so."""
        self.recorder: Recorder | None = None
        self._model, self._autocast = model, autocast
        self._learned: list[torch.nn.Parameter] | None = None
        self._state_then: list[Any] = []

    def saw(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Passes have run as they are: of these parameters, those that have gradients learn."""
        if self.is_on:
            self._learned = [p for p in parameters if p.grad is not None]
            self._state_then = fixed_state(self._model)

    def recorder_for(self, batch: Batch, loss: HeadLoss, *, max_tokens: int, seq: int) -> Recorder | None:
        """What replays the passes of a batch; None where they run as they are, as the first ones do.

        Args:
            max_tokens: of a row at most.
            seq: tokens of a sequence at most.
        """
        if not self.is_on or self.is_paused or self._learned is None or not Recorder.takes(batch, loss):
            return None
        if fixed_state(self._model) != self._state_then:
            self._learned = None
            if self.recorder is not None:
                self.recorder.give_way()
            return None
        if self.recorder is None:
            least = max_tokens // 2 if compiling.is_applied(self._model) else 0
            longest = min(seq, max_positions(self._model) or seq)
            self.recorder = Recorder(
                self._model, self._learned, self._autocast, max_tokens=max_tokens, longest=longest, least_tokens=least
            )
        self.recorder.learned = self._learned
        if not self.recorder.is_worth_it:
            self.stop()
        return self.recorder

    def stop(self) -> None:
        """From now on passes run as they are: memory is short, or what they do cannot be recorded."""
        self.release()
        self.is_on, self.has_stopped = False, True

    def release(self) -> None:
        """Let go of all that was recorded."""
        if self.recorder is not None:
            self.recorder.release()
            self.recorder = None
