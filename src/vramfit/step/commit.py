"""The commit: an optimizer step that is taken whole or not at all, whatever runs out inside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vramfit.step.out_of_memory import free_memory, is_out_of_memory

MAX_BACKUP_BYTES = 32 * 2**20
"""Parameters are stepped in portions of this size, each backed up first, where a step needs temporaries."""
NUM_ATTEMPTS = 3


def secure_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state before its first step, so that running out of memory there costs nothing.

    torch creates state lazily inside `step`; a failure between two tensors of one parameter leaves a state that the
    next try takes for complete. Here an incomplete one is taken back.
    """
    init_group: Any = getattr(optimizer, "_init_group", None)
    if init_group is None:
        return
    before = set(optimizer.state)
    try:
        with torch.no_grad():
            for group in optimizer.param_groups:
                init_group(group, *_lists(init_group))
    except BaseException:
        for parameter in [p for p in optimizer.state if p not in before]:
            del optimizer.state[parameter]
        raise


def _lists(init_group: Any) -> list[list[Any]]:
    """The empty lists that `_init_group(group, params, grads, …)` fills; how many differs by optimizer."""
    return [[] for _ in range(init_group.__code__.co_argcount - 2)]


def needs_temporaries(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step allocates; fused ones do not."""
    return not all(group.get("fused") for group in optimizer.param_groups)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step, whole: out of memory inside it is undone, and done again in smaller portions.

    A fused step needs no temporaries and cannot fail so. Any other goes portion by portion, each backed up first;
    a single parameter that still finds no room is stepped in host memory.
    """
    if not needs_temporaries(optimizer):
        optimizer.step()
        return
    for portion in list(_portions(optimizer)):
        _step_portion(optimizer, portion)


def _step_portion(optimizer: torch.optim.Optimizer, portion: list[torch.nn.Parameter]) -> None:
    for _ in range(NUM_ATTEMPTS):
        if _try(optimizer, portion):
            return
        free_memory()
    if len(portion) == 1:
        _step_on_host(optimizer, portion[0])
        return
    for parameter in portion:
        _step_portion(optimizer, [parameter])


def _try(optimizer: torch.optim.Optimizer, portion: list[torch.nn.Parameter]) -> bool:
    """Step some parameters; where memory runs out they are as before, and the answer is False."""
    backup: _Backup | None = None
    try:
        backup = _Backup(optimizer, portion)
        with _only(optimizer, portion):
            optimizer.step()
    except BaseException as error:
        if backup is not None:
            backup.restore()
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _step_on_host(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> None:
    """The last resort: weight, gradient and state go to host memory, are stepped there, and come back in place."""
    assert parameter.grad is not None
    state = optimizer.state[parameter]
    twin = torch.nn.Parameter(parameter.detach().cpu().clone())
    twin.grad = parameter.grad.detach().cpu()
    optimizer.state[twin] = {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }
    all_params = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [twin] if any(p is parameter for p in group["params"]) else []
        optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, all_params, strict=True):
            group["params"] = params
        stepped = optimizer.state.pop(twin)
    with torch.no_grad():
        parameter.copy_(twin)
        for name, value in stepped.items():
            if isinstance(value, torch.Tensor):
                state[name].copy_(value)
            else:
                state[name] = value


class _Backup:
    """Weights and state of a few parameters, to go back to."""

    def __init__(self, optimizer: torch.optim.Optimizer, portion: list[torch.nn.Parameter]) -> None:
        with torch.no_grad():
            self._copies = [(t, t.detach().clone()) for t in _tensors(optimizer, portion)]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)


def _tensors(optimizer: torch.optim.Optimizer, portion: list[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    for parameter in portion:
        yield parameter
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor):
                yield value


def _portions(optimizer: torch.optim.Optimizer) -> Iterator[list[torch.nn.Parameter]]:
    portion: list[torch.nn.Parameter] = []
    size = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if portion and size + parameter.nbytes > MAX_BACKUP_BYTES:
                yield portion
                portion, size = [], 0
            portion.append(parameter)
            size += parameter.nbytes
    if portion:
        yield portion


@contextmanager
def _only(optimizer: torch.optim.Optimizer, portion: list[torch.nn.Parameter]) -> Iterator[None]:
    """For a moment the optimizer has only these parameters."""
    chosen = {id(p) for p in portion}
    all_params = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in chosen]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, all_params, strict=True):
            group["params"] = params
