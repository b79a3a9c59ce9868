"""`Backup`: weights, optimizer state and group settings of a few parameters, to go back to."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Backup:
    """What a step changes, as it was before; made in full or not at all."""

    def __init__(self, optimizer: torch.optim.Optimizer, portion: list[torch.nn.Parameter]) -> None:
        self._optimizer = optimizer
        with torch.no_grad():
            self._weights = list(zip(portion, _copies(portion), strict=True))
            self._states = [(p, optimizer.state.get(p)) for p in portion]
            tensors = [v for _, state in self._states for v in (state or {}).values() if isinstance(v, torch.Tensor)]
            copies = iter(_copies(tensors))
        self._states = [(p, _with(state, copies)) for p, state in self._states]
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


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors; plain ones of one kind in a single call, since a launch for each costs more than the copy."""
    made: list[Any] = [None] * len(tensors)
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_floating_point():
            alike.setdefault((tensor.dtype, tensor.device), []).append(i)
        else:
            made[i] = _clone(tensor.detach())
    for indices in alike.values():
        copies = torch._foreach_mul([tensors[i].detach() for i in indices], 1.0)
        for i, copy in zip(indices, copies, strict=True):
            made[i] = copy
    return made


def _clone(tensor: Any) -> Any:
    """A copy; of a tensor made of tensors, such as torchao's quantized state, part by part: not all can be cloned."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.clone()
    names, rest = tensor.__tensor_flatten__()
    parts = {name: _clone(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(parts, rest, tensor.shape, tensor.stride())


def _with(state: dict[str, Any] | None, copies: Any) -> dict[str, Any] | None:
    if state is None:
        return None
    return {name: next(copies) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
