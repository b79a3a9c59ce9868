"""`Backup`: weights, optimizer state and group settings of a few parameters, to go back to."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vramfit.step.own_parts import local


class Backup:
    """What a step changes, as it was before; made in full or not at all."""

    def __init__(self, optimizer: torch.optim.Optimizer, portion: list[torch.nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = portion
        self._states = [dict(optimizer.state[p]) if p in optimizer.state else None for p in portion]
        with torch.no_grad():
            self._kept = _Copies([local(tensor) for tensor in (*portion, *_tensors(self._states))])
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    def restore(self) -> None:
        """Put everything back, in the tensors that are there."""
        copies = iter(self._kept.tensors())
        with torch.no_grad():
            for parameter in self._parameters:
                local(parameter).copy_(next(copies))
            for parameter, state in zip(self._parameters, self._states, strict=True):
                self._restore_state(parameter, _with(state, copies))
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
                local(now[name]).copy_(value)
            else:
                now[name] = value


class _Copies:
    """Copies of tensors; plain ones of one kind lie in one piece of memory, since a launch for each costs more."""

    def __init__(self, originals: Sequence[torch.Tensor]) -> None:
        self._originals = originals
        self._alone: dict[int, Any] = {}
        self._alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        with torch.no_grad():
            for i, tensor in enumerate(originals):
                if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_contiguous():
                    self._alike.setdefault((tensor.dtype, tensor.device), []).append(i)
                else:
                    self._alone[i] = _clone(tensor.detach())
            self._flat = [_flatten_dense_tensors([originals[i] for i in kind]) for kind in self._alike.values()]

    def tensors(self) -> list[torch.Tensor]:
        """One for each original."""
        made: dict[int, torch.Tensor] = dict(self._alone)
        for flat, kind in zip(self._flat, self._alike.values(), strict=True):
            made |= zip(kind, _unflatten_dense_tensors(flat, [self._originals[i] for i in kind]), strict=True)
        return [made[i] for i in range(len(self._originals))]


def _tensors(states: list[dict[str, Any] | None]) -> list[torch.Tensor]:
    return [value for state in states for value in (state or {}).values() if isinstance(value, torch.Tensor)]


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
