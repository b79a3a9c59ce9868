"""The optimizer of a run: matrices decay, biases and norms do not."""

from typing import Any

import torch

from vramfit.runtime.training.request import TrainRequest
from vramfit.techniques import optimizers
from vramfit.workload import Workload


def make_optimizer(workload: Workload, model: torch.nn.Module, request: TrainRequest) -> torch.optim.Optimizer:
    """The optimizer over what learns: matrices with weight decay, biases and norms without."""
    optimizer = optimizers.make(workload.optimizer, model.parameters(), lr=request.lr)
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
