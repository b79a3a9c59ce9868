"""The commit: an optimizer step that is taken whole or not at all, whatever runs out inside it."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.errors import RecoveryExhausted
from vramfit.step.backup import Backup
from vramfit.step.out_of_memory import free_memory, is_out_of_memory
from vramfit.step.own_parts import local
from vramfit.techniques.host_step import HostStep

PORTION_BYTES = 32 * 2**20
"""Parameters are stepped in portions of at least this size, each backed up first, where a step needs temporaries."""
NUM_ATTEMPTS = 3
"""Tries of a portion as it is, memory freed in between, before it is halved."""
PER_PARAMETER = ("torch.optim.", "torchao.optim.")
"""Optimizers whose step looks at one parameter at a time, so that portions are the same as the whole. Others may
keep count of their steps in a group, and are stepped at once."""

Parameters = list[torch.nn.Parameter]


def secure_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state before its first step, so that running out of memory there costs nothing.

    torch creates state lazily inside `step`; a failure between two tensors of one parameter leaves a state that the
    next try takes for complete. Here an incomplete one is taken back.
    """
    init_group: Any = getattr(optimizer, "_init_group", None)
    learned = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    if init_group is None or all(p in optimizer.state for p in learned):
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
    return [[] for _ in range(len(inspect.signature(init_group).parameters) - 1)]


def needs_temporaries(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step allocates; fused ones do not, and others may say so."""
    if getattr(optimizer, "steps_in_place", False):
        return False
    return not all(group.get("fused") for group in optimizer.param_groups)


def goes_in_portions(optimizer: torch.optim.Optimizer) -> bool:
    """Whether stepping some parameters and then the others is the same as stepping all."""
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return f"{type(optimizer).__module__}.".startswith(PER_PARAMETER) and not hooked


def take_step(
    optimizer: torch.optim.Optimizer,
    *,
    room: Callable[[], int] = lambda: 0,
    size_of: Callable[[torch.nn.Parameter], int] = lambda parameter: parameter.nbytes,
) -> None:
    """One optimizer step, whole: out of memory inside it is undone, and done again in smaller portions.

    A fused step needs no temporaries and cannot fail so. Any other goes portion by portion, each backed up first;
    a single parameter that still finds no room is stepped in host memory.

    Args:
        room: gives the bytes known to be there beside what is in use: portions are as large as they allow.
        size_of: what a parameter counts for in a portion; of a shard, its whole parameter.

    Raises:
        RecoveryExhausted: an optimizer that only steps as a whole found no room; everything is as before.
    """
    if not needs_temporaries(optimizer):
        optimizer.step()
        return
    if not goes_in_portions(optimizer):
        _step_at_once(optimizer)
        return
    for portion in list(_portions(optimizer, room(), size_of)):
        _step_portion(optimizer, portion)


def take_host_step(optimizer: torch.optim.Optimizer, host: HostStep) -> None:
    """One step of an optimizer that lives in host memory: no memory of the device can run out in it.

    On the device where it streams; else in portions, so that the weights of one are on their way to the device while
    the next is stepped.
    """
    if host.traces:  # the device sees the weights come back
        host.write()
        return
    if host.streams:
        host.step(optimizer)
        return
    if not goes_in_portions(optimizer):
        optimizer.step()
        host.write()
        return
    for portion in list(_portions(optimizer, 0)):
        with _only(optimizer, portion):
            optimizer.step()
        host.write(portion)


def _step_at_once(optimizer: torch.optim.Optimizer) -> None:
    everything = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for _ in range(NUM_ATTEMPTS):
        if _try(optimizer, everything):
            return
        free_memory()
    raise RecoveryExhausted(
        f"the step of {type(optimizer).__name__} found no memory in {NUM_ATTEMPTS} tries; the weights are as before it",
        attempts=["the whole step"] * NUM_ATTEMPTS,
        hint="take an optimizer of torch.optim with fused=True, whose step needs no memory of its own",
    )


def _step_portion(optimizer: torch.optim.Optimizer, portion: Parameters, num_attempts: int = NUM_ATTEMPTS) -> None:
    for attempt in range(num_attempts):
        if attempt:
            free_memory()
        if _try(optimizer, portion):
            return
    if len(portion) == 1:
        _step_on_host(optimizer, portion[0])
        return
    middle = len(portion) // 2
    for half in (portion[:middle], portion[middle:]):
        _step_portion(optimizer, half, num_attempts=1)  # all that can be freed is: to collect for each takes minutes


def _try(optimizer: torch.optim.Optimizer, portion: Parameters) -> bool:
    """Step some parameters; where memory runs out they are as before, and the answer is False."""
    backup: Backup | None = None
    try:
        backup = Backup(optimizer, portion)
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
    """The last resort: weight, gradient and state go to host memory, are stepped there, and come back in place.

    Out of sight of dispatch modes: an emulated GPU would take what is on the host for its own.
    """
    assert parameter.grad is not None
    state = optimizer.state[parameter]
    with _disable_current_modes(), torch.no_grad():
        twin = torch.nn.Parameter(local(parameter).detach().cpu().clone())
        twin.grad = local(parameter.grad).detach().cpu()
        optimizer.state[twin] = {
            name: local(value).detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
        try:
            with _only(optimizer, [parameter], stand_in=twin):
                optimizer.step()
        finally:
            stepped = optimizer.state.pop(twin)
        local(parameter).copy_(twin)
        for name, value in stepped.items():
            if isinstance(value, torch.Tensor):
                local(state[name]).copy_(value)
            else:
                state[name] = value


def _portions(
    optimizer: torch.optim.Optimizer,
    room_bytes: int,
    size_of: Callable[[torch.nn.Parameter], int] = lambda parameter: parameter.nbytes,
) -> Iterator[Parameters]:
    portion: Parameters = []
    size = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if portion and size + size_of(parameter) > max(PORTION_BYTES, room_bytes // _copies(optimizer, parameter)):
                yield portion
                portion, size = [], 0
            portion.append(parameter)
            size += size_of(parameter)
    if portion:
        yield portion


def _copies(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> int:
    """How many times a parameter's size a step takes: itself and its state backed up, and two temporaries."""
    return 3 + sum(isinstance(value, torch.Tensor) for value in optimizer.state.get(parameter, {}).values())


@contextmanager
def _only(
    optimizer: torch.optim.Optimizer, portion: Parameters, stand_in: torch.nn.Parameter | None = None
) -> Iterator[None]:
    """For a moment the optimizer has only these parameters, or something in their place."""
    chosen = {id(p) for p in portion}
    all_params = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [p if stand_in is None else stand_in for p in group["params"] if id(p) in chosen]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, all_params, strict=True):
            group["params"] = params
