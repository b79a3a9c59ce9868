"""`Backup`: weights, optimizer state and group settings of a few parameters, to go back to."""

from typing import Any

import torch


class Backup:
    """What a step changes, as it was before; made in full or not at all."""

    def __init__(self, optimizer: torch.optim.Optimizer, portion: list[torch.nn.Parameter]) -> None:
        self._optimizer = optimizer
        with torch.no_grad():
            self._weights = [(p, p.detach().clone()) for p in portion]
            self._states = [(p, _copied(optimizer.state[p]) if p in optimizer.state else None) for p in portion]
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    def restore(self) -> None:
        """Put everything back, in the tensors that are there."""
        with torch.no_grad():
            for parameter, copy in self._weights:
                parameter.copy_(copy)
            for parameter, state in self._states:
                self._restore_state(parameter, state)
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(values)

    def _restore_state(self, parameter: torch.nn.Parameter, before: dict[str, Any] | None) -> None:
        if before is None:
            self._optimizer.state.pop(parameter, None)
            return
        now = self._optimizer.state[parameter]
        for name in [name for name in now if name not in before]:
            del now[name]
        for name, value in before.items():
            if isinstance(value, torch.Tensor):
                now[name].copy_(value)
            else:
                now[name] = value


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
