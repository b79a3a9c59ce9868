"""A model on the meta device: all of its structure, none of its weights."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from vramfit.errors import CheckpointError, WorkloadError
from vramfit.models.configuration import default_attention, in_full_precision, make_ready, supported_attention
from vramfit.models.resolve import ResolvedModel
from vramfit.tasks import find_task
from vramfit.workload import CHOICES, Workload

if TYPE_CHECKING:
    from torch import nn

DRAWING = ("constant_", "kaiming_uniform_", "normal_", "ones_", "uniform_", "xavier_uniform_", "zeros_")
"""The functions of `torch.nn.init` that torch's own modules call as they are made."""


@contextmanager
def undrawn() -> Iterator[None]:
    """While it lasts, `torch.nn.init` leaves tensors on the meta device as they are; real ones, which another thread
    may be making, are drawn as ever."""
    import torch

    left_alone: dict[str, Any] = {name: _left_alone(getattr(torch.nn.init, name)) for name in DRAWING}
    with patch.multiple(torch.nn.init, **left_alone):
        yield


def _left_alone(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Once: threads that end in another order than they began may leave one behind, but never a pile."""
    if hasattr(draw, "leaves_meta_alone"):
        return draw

    def fill(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if tensor.is_meta else draw(tensor, *args, **kwargs)

    fill.leaves_meta_alone = True  # type: ignore[attr-defined]
    return fill


def build(resolved: ResolvedModel, attention: str | None = None) -> "nn.Module":
    """`model_class(config)` on torch's default device, in fp32, ready for batches and with what its task adds to it.

    Args:
        resolved: what `resolve` gave, no module; its configuration is copied, not changed.
        attention: a kernel; None for the model's default.

    Raises:
        CheckpointError: the configuration contradicts itself, so that no model can be built from it.
    """
    config = copy.deepcopy(resolved.config)
    in_full_precision(config)
    config._attn_implementation = _built_with(attention) or default_attention(resolved.model_class)
    try:
        model: nn.Module = resolved.model_class(config)
    except Exception as error:  # model code raises whatever its constructor happens to raise
        raise _cannot_build(resolved, config, attention, error) from None
    make_ready(model)
    find_task(resolved.task).finish_model(model, resolved.parts)
    return model


def build_meta(resolved: ResolvedModel, attention: str | None = None) -> "nn.Module":
    """The model with every parameter and buffer on the meta device, in fp32, ready to train.

    It is `model_class(config)` under `torch.device("meta")`: transformers sees the device and skips its
    weight initialisation, and `undrawn` has torch skip its own (BERT-large takes about 0.015 s). A module that was
    given is copied instead, with its own dtypes, frozen parameters and training mode.

    Args:
        resolved: what `resolve` gave; its configuration is copied, not changed.
        attention: a kernel of `supported_attention`; None for the model's default, which for a module
            that was given is the one it has.

    Raises:
        WorkloadError: the model has no such attention kernel.
        CheckpointError: the configuration contradicts itself, so that no model can be built from it.
    """
    if resolved.module is not None:
        return _copy_to_meta(resolved.module, attention)
    import torch

    _check_attention(resolved.model_class, resolved.name, attention)
    with undrawn(), torch.device("meta"):
        model = build(resolved, attention)
    if any(not t.is_meta for t in (*model.parameters(), *model.buffers())):
        model.to("meta")  # some of transformers' code draws on the host whatever device is asked for
    return model


def build_for(resolved: ResolvedModel, workload: Workload, *, on_meta: bool = True) -> "nn.Module":
    """The same, or the model on torch's default device, with the attention kernel that a workload asks for."""
    return (build_meta if on_meta else build)(resolved, attention=workload.attention)


def _copy_to_meta(module: "nn.Module", attention: str | None) -> "nn.Module":
    """The module's twin without its data: `deepcopy` finds each tensor's meta twin in its memo.

    Tied weights stay tied, frozen ones frozen; nothing is read from the module's storage.
    """
    import torch

    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:  # whatever the module holds besides tensors
        reason = " ".join(str(error).split())[:300]
        raise WorkloadError([f"{type(module).__name__} cannot be copied: {reason}"]) from None
    if attention is not None:
        _check_attention(type(module), type(module).__name__, attention)
        config = getattr(twin, "config", None)
        if config is not None:
            config._attn_implementation = _built_with(attention)
    return twin


def with_attention(workload: Workload, resolved: ResolvedModel) -> Workload:
    """A workload with the kernel that the model takes where none is asked for; a module that was given has one."""
    if not workload.has_own_attention:
        return workload
    if resolved.module is None:
        return replace(workload, attention=default_attention(resolved.model_class))
    chosen = getattr(resolved.config, "_attn_implementation", None)
    return replace(workload, attention=chosen) if chosen in CHOICES["attention"] else workload


def missing_kernel(resolved: ResolvedModel, workload: Workload) -> list[str]:
    """The attention kernel of transformers that a workload asks for and the model does not have, in words."""
    supported = supported_attention(resolved.model_class)
    if workload.attention not in ("sdpa", "eager") or workload.attention in supported:
        return []
    has = ", ".join(a for a in supported if a in ("sdpa", "eager"))
    return [f"{resolved.name} has no attention {workload.attention} (it has {has})"]


def _built_with(attention: str | None) -> str | None:
    """`packed` is put in afterwards (`techniques.packing`)."""
    return "sdpa" if attention == "packed" else attention


def _check_attention(model_class: type, name: str, attention: str | None) -> None:
    supported = supported_attention(model_class)
    if attention is not None and attention in ("sdpa", "packed") and attention not in supported:
        raise WorkloadError(
            [f"{name} ({model_class.__name__}) has no attention {attention!r} in transformers"],
            hint=f"it has {', '.join(supported)}",
        )


def _cannot_build(
    resolved: ResolvedModel, config: Any, attention: str | None, error: Exception
) -> CheckpointError | WorkloadError:
    reason = " ".join(str(error).split())[:300]
    if attention is not None and (isinstance(error, ImportError) or "attn_implementation" in reason):
        return WorkloadError([f"{resolved.name}: attention {attention!r} cannot be used: {reason}"])
    where = str(resolved.folder / "config.json") if resolved.folder is not None else resolved.name
    if isinstance(error, KeyError) and error.args:
        fields = [key for key, value in config.to_dict().items() if value == error.args[0]]
        key = str(error.args[0])[:60]
        reason = f"{fields[0]} is {key!r}, which is unknown" if fields else f"no {key!r}"
    return CheckpointError(
        f"{where}: {resolved.model_class.__name__} cannot be built: {reason}",
        file=where,
        hint="compare the field with the configuration the model was published with",
    )
