"""What a run is made of at one moment, as plain tensors and JSON: learned weights, optimizer state, generators."""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.errors import VramfitError
from vramfit.step.own_loss import full, put_part
from vramfit.step.recovery import RandomState
from vramfit.techniques.offloading.host_step import HostStep

PART = "|"
"""Between the name of a parameter and the name of its state."""
MASTER = "master"
"""The state of a weight of few bits whose optimizer is in host memory: itself, in fp32."""
Tensors = dict[str, torch.Tensor]


def learned_tensors(model: torch.nn.Module) -> Tensors:
    """The parameters that learn, by name, each once; what is frozen comes from the source again."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor to be saved: one that is sharded, gathered from all processes, on the host."""
    return full(tensor.detach()).cpu() if hasattr(tensor, "full_tensor") else tensor.detach()


def restore_learned(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Put saved weights into a model's own tensors.

    Raises:
        VramfitError: weights of another model.
    """
    own = learned_tensors(model)
    if set(own) != set(saved) or any(own[name].shape != saved[name].shape for name in own):
        raise VramfitError(
            "the checkpoint's weights are those of another model, or other parts of it learned",
            hint="resume with the model and the settings of the run, or start anew in another folder",
        )
    with _disable_current_modes(), torch.no_grad():
        for name, tensor in own.items():
            put_part(tensor, saved[name])


def _stepped(model: torch.nn.Module, host: HostStep | None) -> dict[str, torch.nn.Parameter]:
    """Name → what the optimizer steps: the parameter, or its master in host memory."""
    masters = {} if host is None else host.masters
    return {name: masters.get(id(p), p) for name, p in model.named_parameters()}


def optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, host: HostStep | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """The optimizer's tensors and its other values, both by parameter name.

    Args:
        host: where the optimizer is in host memory; masters that know more than the weights are saved too.
    """
    names = {id(p): name for name, p in _stepped(model, host).items()}
    tensors: Tensors = {}
    scalars: dict[str, Any] = {}
    for home in host.homes if host is not None else ():
        if home.weight.dtype != home.master.dtype:
            tensors[f"{names[id(home.master)]}{PART}{MASTER}"] = home.master.detach()
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"{names[id(parameter)]}{PART}{key}"
            if isinstance(value, torch.Tensor):
                tensors[name] = whole(value)
            else:
                scalars[name] = value
    return tensors, scalars


def restore_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, torch.Tensor],
    scalars: dict[str, Any],
    host: HostStep | None = None,
) -> None:
    """Put saved state into an optimizer, into the tensors that are there where there are any.

    A rehearsal has made them; without one they are made here, on the parameter's device, but for what torch keeps on
    the host (the count of steps of an optimizer that is not fused). The weights have been restored before.
    """
    parameters = _stepped(model, host)
    with _disable_current_modes(), torch.no_grad():
        if host is not None:
            host.read()
        for path, tensor in saved.items():
            name, key = path.split(PART)
            if key == MASTER:
                parameters[name].copy_(tensor)
            else:
                _put(optimizer, parameters[name], key, tensor)
    for path, value in scalars.items():
        name, key = path.split(PART)
        optimizer.state[parameters[name]][key] = value


def _put(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, key: str, tensor: torch.Tensor) -> None:
    state = optimizer.state[parameter]
    if key in state:
        put_part(state[key], tensor)
        return
    fused = any(group.get("fused") for group in optimizer.param_groups)
    on_host = tensor.dim() == 0 and not fused
    state[key] = tensor.clone() if on_host else tensor.to(parameter.device, copy=True)


def random_tensors(state: RandomState) -> Tensors:
    """torch's generators."""
    return {"host": state.host, **{f"device{i}": value for i, value in enumerate(state.devices)}}


def random_values(state: RandomState) -> dict[str, Any]:
    """The generators of Python and numpy, as JSON takes them."""
    version, words, gauss = state.python
    numpy = state.numpy
    return {
        "python": [version, list(words), gauss],
        "numpy": None if numpy is None else [numpy[0], [int(n) for n in numpy[1]], *map(_plain, numpy[2:])],
    }


def _plain(value: Any) -> int | float:
    return value if isinstance(value, float) else int(value)


def restore_random(tensors: Mapping[str, torch.Tensor], values: dict[str, Any]) -> None:
    """Turn all generators to where they were."""
    version, words, gauss = values["python"]
    numpy = values["numpy"]
    devices = [tensors[f"device{i}"] for i in range(len(tensors) - 1)]
    if numpy is not None:
        import numpy as np

        numpy = (numpy[0], np.array(numpy[1], dtype=np.uint32), *numpy[2:])
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    RandomState(
        host=tensors["host"],
        devices=tuple(devices) if len(devices) == present else (),
        python=(version, tuple(words), gauss),
        numpy=numpy,
    ).restore()


def seed_everything(seed: int) -> None:
    """Seed Python, torch on every device, and numpy where it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
