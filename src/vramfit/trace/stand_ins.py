"""torch on the meta device where it asks the device type: for the length of a trace, meta answers as cuda does."""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._foreach_utils
import torch.utils.checkpoint

from vramfit.cuda.dialect import Autocast


def autocast_context(autocast: Autocast) -> type:
    """A class that stands for `torch.autocast` and switches the traced autocast."""

    class TracedAutocast:
        def __init__(self, device_type: str = "cuda", dtype: Any = None, enabled: bool = True, **_: Any) -> None:
            self._ignored = device_type == "cpu"
            self._enabled = enabled

        def __enter__(self) -> None:
            if not self._ignored:
                self._before = autocast.enter(self._enabled)

        def __exit__(self, *_: object) -> None:
            if not self._ignored:
                autocast.leave(self._before)

    return TracedAutocast


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers comments on settings of the model that a trace puts together, and nobody asked."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def stand_ins(model: torch.nn.Module, autocast: Autocast) -> Iterator[None]:
    """While it lasts: autocast, checkpointing, foreach and fused kernels work on meta as on CUDA."""
    context = autocast_context(autocast)
    real_is_enabled, real_dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def is_enabled(device_type: str = "cuda") -> bool:
        return autocast.enabled if device_type in ("meta", "cuda") else real_is_enabled(device_type)

    def dtype_of(device_type: str = "cuda") -> torch.dtype:
        found = autocast.dtype if device_type in ("meta", "cuda") else None
        return found or real_dtype_of(device_type)

    def recompute_kwargs(device_type: str = "cuda") -> tuple[dict[str, Any], dict[str, Any]]:
        return {"enabled": autocast.enabled}, {"enabled": False}

    def with_meta() -> list[str]:
        return ["cuda", "meta"]

    # torch.optim deletes the names of its submodules, so they are found by import
    adam, optimizer = (import_module(f"torch.optim.{name}") for name in ("adam", "optimizer"))
    replaced: list[tuple[Any, str, Any]] = [
        (torch, "autocast", context),
        (torch.amp, "autocast", context),
        (torch, "is_autocast_enabled", is_enabled),
        (torch, "get_autocast_dtype", dtype_of),
        (torch.amp, "is_autocast_available", lambda device_type: True),
        (torch.utils.checkpoint, "_get_autocast_kwargs", recompute_kwargs),
        (torch.utils._foreach_utils, "_get_foreach_kernels_supported_devices", with_meta),
        (torch.utils._foreach_utils, "_get_fused_kernels_supported_devices", with_meta),
        (optimizer, "_get_foreach_kernels_supported_devices", with_meta),
        (adam, "_device_dtype_check_for_fused", lambda *_, **__: None),
    ]
    # transformers' own wrapper ignores meta; model files hold it by name
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    replaced += [(file, "maybe_autocast", context) for file in files if hasattr(file, "maybe_autocast")]
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield
