"""The commit: an optimizer step that is taken whole or not at all, whatever runs out inside it."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from vramfit.errors import RecoveryExhausted
from vramfit.step.own_loss import local
from vramfit.step.recovery import free_memory, is_out_of_memory
from vramfit.techniques.offloading.host_step import HostStep


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


class Touch(torch.autograd.Function):
    """Gives no gradients: hooks run, in the engine's order, and find those that are there."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *touched: torch.Tensor) -> torch.Tensor:
        ctx.num = 1 + len(touched)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None,) * ctx.num


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
