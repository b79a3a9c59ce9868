"""`Ranks`: what a step asks of the processes that share it; `Alone` where there is only one."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Votes(Protocol):
    """The part of an `RankVotes` that a step uses."""

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
    def votes(self) -> Votes:
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

    def size_of(self, parameter: torch.nn.Parameter) -> int:
        """Bytes that a parameter counts for in a portion of the optimizer's step; of a shard, its whole parameter."""

    def total(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of all ranks: the sum of each one's part."""

    def bring_together(self, vectors: torch.Tensor) -> None:
        """Rows that each rank has a part of, and zeros elsewhere, become all rows on every rank."""


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
    """One process: nothing to share, nothing to wait for. Ranks of several override what they do otherwise."""

    rank, size = 0, 1
    is_sharded = False
    votes: Votes = Unanimous()

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
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)

    def size_of(self, parameter: torch.nn.Parameter) -> int:
        return parameter.nbytes

    def bring_together(self, vectors: torch.Tensor) -> None:
        return

    def total(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.size == 1 else loss.new_tensor(self.votes.sum(float(loss)))
