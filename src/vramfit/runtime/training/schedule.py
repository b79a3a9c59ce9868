"""The learning rate over a run: a warm-up, then a straight line, half a cosine, or nothing at all."""

import math
import random
import sys
from typing import Any

import torch

from vramfit.runtime.training.request import TrainRequest
from vramfit.techniques import application
from vramfit.workload import Workload


def seed_everything(seed: int) -> None:
    """Seed Python, torch on every device, and numpy where it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


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
