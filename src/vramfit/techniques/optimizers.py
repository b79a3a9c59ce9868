"""Optimizers by name, with the implementation spelled out so that any device takes the same path."""

from collections.abc import Iterable

import torch

from vramfit.errors import WorkloadError
from vramfit.techniques import adamw_8bit
from vramfit.workload import Workload


def make(asked: Workload | str, parameters: Iterable[torch.nn.Parameter], lr: float = 1e-5) -> torch.optim.Optimizer:
    """The optimizer that a workload asks for, or the one of this name, over the parameters that learn.

    Raises:
        WorkloadError: an unknown name, no parameter that learns, or no compiler for adamw-8bit on a GPU.
    """
    name = asked if isinstance(asked, str) else asked.optimizer
    learned = [p for p in parameters if p.requires_grad]
    if not learned:
        raise WorkloadError(["nothing learns: every parameter of the model is frozen"])
    if name == "adamw":
        return torch.optim.AdamW(learned, lr=lr, foreach=True)
    if name == "adamw-fused":
        return torch.optim.AdamW(learned, lr=lr, fused=True)
    if name == "adamw-single":
        return torch.optim.AdamW(learned, lr=lr, foreach=False)
    if name == "sgd":
        return torch.optim.SGD(learned, lr=lr, foreach=True)
    if name == "adafactor":
        return torch.optim.Adafactor(learned, lr=lr, foreach=False)
    if name == "adamw-8bit":
        return adamw_8bit.make(learned, lr)
    raise WorkloadError([f"optimizer {name} is not available"])
