"""`Ranks`: what a `Stepper` asks of the processes it trains with; `Alone` where there is only one."""

from collections.abc import Sequence
from typing import Protocol

import torch

from vramfit.step.window import clip


class Votes(Protocol):
    """The part of an `Accord` that a step uses."""

    def agree(self, *values: int) -> tuple[int, ...]: ...
    def agree_on(self, value: int, what: str) -> None: ...
    def report(self, error: BaseException) -> None: ...
    def give_up(self, error: BaseException) -> None: ...
    def sum(self, value: float) -> float: ...


class Ranks(Protocol):
    """Processes that share every effective batch; each sees all of it and takes its own part."""

    rank: int
    size: int
    is_sharded: bool
    """Whether each process has a part of the model: passes are meetings then, and autocast keeps no casts."""

    @property
    def accord(self) -> Votes:
        """Their votes."""

    def begin(self) -> None:
        """A window begins: gradients are none, or zero."""

    def forget(self) -> None:
        """A window was given up: as if it had not begun."""

    def rest(self) -> None:
        """Passes without a backward are through: whatever they gathered is given back."""

    def num_passes(self, own: int) -> int:
        """Forward passes of this window, where this rank has micro-batches for so many."""

    def before_pass(self, index: int, num_passes: int) -> None:
        """A forward pass is about to begin."""

    def synchronise(self) -> None:
        """Gradients become those of all ranks; all have agreed that they are well."""

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Take the scale out of the gradients; what overflowed on one rank has overflowed on all."""

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_grad_norm: float | None) -> None:
        """Clip the gradient of all ranks together."""


class Unanimous:
    """The votes of one."""

    def agree(self, *values: int) -> tuple[int, ...]:
        return values

    def agree_on(self, value: int, what: str) -> None:
        return

    def report(self, error: BaseException) -> None:
        return

    def give_up(self, error: BaseException) -> None:
        return

    def sum(self, value: float) -> float:
        return value


class Alone:
    """One process: nothing to share, nothing to wait for."""

    rank, size = 0, 1
    is_sharded = False

    def __init__(self) -> None:
        self.accord: Votes = Unanimous()

    def begin(self) -> None:
        return

    def forget(self) -> None:
        return

    def rest(self) -> None:
        return

    def num_passes(self, own: int) -> int:
        return own

    def before_pass(self, index: int, num_passes: int) -> None:
        return

    def synchronise(self) -> None:
        return

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        scaler.unscale_(optimizer)

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_grad_norm: float | None) -> None:
        clip(parameters, max_grad_norm)
