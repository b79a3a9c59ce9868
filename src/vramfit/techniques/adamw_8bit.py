"""adamw-8bit: torchao's AdamW, whose moments take a byte a weight, a scale for each block of 256, and a table.

torchao compiles the step of a parameter. Two things are settled here so that what it takes is known: the state of
all parameters is made before the first of them is stepped, and Inductor does not try out variants of its kernels on
the device (copies of what they change, and a buffer of the size of its cache, would come on top). A prediction
requests what the compiled step does; where there is no compiler, a CPU takes the same step uncompiled.
"""

import shutil
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from vramfit.errors import MissingExtra, WorkloadError
from vramfit.techniques.quiet import quiet

OLDEST_TORCHAO = "0.18"
COMPILERS = ("c++", "g++", "clang++", "cl")
UNTRIED = {"triton.autotune_pointwise": False, "deterministic": True}
"""Inductor's settings under which no kernel is tried out on the device (torch 2.11; older ones may lack some)."""


def make(parameters: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The optimizer over parameters that learn.

    Raises:
        MissingExtra: torchao is not installed.
        WorkloadError: parameters on a GPU, and no Triton to compile their step.
    """
    made = _optimizer_class()
    if any(p.device.type == "cuda" for p in parameters) and find_spec("triton") is None:
        raise WorkloadError(
            ["optimizer adamw-8bit compiles its step, and this torch has no Triton to do so on a GPU"],
            hint="install triton, or take adamw-fused or adafactor",
        )
    optimizer: torch.optim.Optimizer = made(parameters, lr=lr)
    return optimizer


def has_compiler() -> bool:
    """Whether Inductor finds what it compiles with on a CPU."""
    return any(shutil.which(name) for name in COMPILERS)


def request_temporaries(parameter: torch.nn.Parameter, moment: Any) -> None:
    """What the compiled step of a parameter holds at once: both moments in full and scaled, and their new scales.

    Seen in Inductor's code and on an H200 (torch 2.11 and 2.13): a step of a parameter whose moments are not
    quantized is one kernel and takes nothing.
    """
    scale = getattr(moment, "scale", None)
    if scale is not None:
        scales = [torch.empty_like(scale) for _ in range(2)]
        moments = [torch.empty_like(parameter, dtype=torch.float32) for _ in range(2)]
        del moments, scales


@cache
def _optimizer_class() -> Any:
    """torchao's class with the state made first; it is defined late because torchao is optional."""
    optim = _torchao_optim()
    _teach_copying(import_module("torchao.optim.subclass_8bit").OptimState8bit)

    class AdamW8bit(optim.AdamW8bit):  # type: ignore[misc, name-defined]
        def _init_group(self, group: dict[str, Any]) -> None:
            """The state of the parameters that have a gradient, as torchao makes it inside its step."""
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter].update(
                        step=torch.tensor(0.0),
                        exp_avg=self._moment(parameter, True),
                        exp_avg_sq=self._moment(parameter, False),
                    )

        def _moment(self, parameter: torch.nn.Parameter, signed: bool) -> Any:
            made = self._new_buffer(parameter, signed)
            if parameter.device.type == "meta" and hasattr(made, "qmap"):
                made.qmap = made.qmap.clone()  # its table comes from a list, which no mode sees
            return made

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                self._init_group(group)
            stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            if any(p.device.type == "meta" for p in stepped):
                for parameter in stepped:
                    request_temporaries(parameter, self.state[parameter]["exp_avg"])
                return None
            if _is_watched() or (any(p.device.type == "cpu" for p in stepped) and not has_compiler()):
                return self._step_uncompiled(closure)
            with _nothing_tried_out():
                return super().step(closure)

        def _step_uncompiled(self, closure: Any) -> Any:
            """torchao's own function for a parameter, called as its step would."""
            with torch.enable_grad():
                loss = None if closure is None else closure()
            step_one = import_module("torchao.optim.adam").single_param_adam
            for group in self.param_groups:
                settings = (group["lr"], *group["betas"], group["weight_decay"], group["eps"], self.is_adamw, False)
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter]
                    state["step"] += 1
                    moments = (state["exp_avg"], state["exp_avg_sq"], None)
                    step_one(parameter.detach(), parameter.grad, state["step"], *moments, *settings)
            return loss

    return AdamW8bit


def _is_watched() -> bool:
    """Whether a mode looks at every operator, which compiled code would hide from it."""
    return torch.utils._python_dispatch._get_current_dispatch_mode() is not None


def _nothing_tried_out() -> AbstractContextManager[Any]:
    inductor: Any = import_module("torch._inductor.config")
    settings = {name: value for name, value in UNTRIED.items() if hasattr(inductor, name)}
    patched: AbstractContextManager[Any] = inductor.patch(settings)
    return patched


def _teach_copying(state: Any) -> None:
    """A quantized moment can be cloned, for a step that may have to be taken back; torchao has only `copy_`."""

    @state.implements_torch_function([torch.Tensor.clone, torch.clone])  # type: ignore[untyped-decorator]
    def _clone(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        moment = args[0]
        parts = (moment.codes.clone(), moment.scale.clone(), moment.qmap.clone())
        return state(*parts, moment.signed, dtype=moment.dtype)


def _torchao_optim() -> Any:
    try:
        with quiet("torchao", "torch.utils._pytree"):
            return import_module("torchao.optim")
    except ImportError:
        needed = f"torchao {OLDEST_TORCHAO} or newer"
        raise MissingExtra("optimizer adamw-8bit", extra="train", package=needed) from None
