"""adamw-8bit: AdamW whose moments take a byte a weight and a scale for each block of 256.

The moments are those of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), as torchao and bitsandbytes
keep them. The step of a matrix is one kernel (`eight_bit_step`): it takes no memory of its own, and nothing has to be
compiled for a shape. Small tensors keep full moments and are stepped together by torch's fused kernel.

Weights in bfloat16 are too coarse for small updates: matrices are rounded by chance, so that updates count on average,
and small tensors have masters in fp32.
"""

from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch

from vramfit.errors import WorkloadError
from vramfit.techniques.eight_bit_step import BLOCK, eight_bit_step, tables

LEAST_QUANTIZED = 4096
"""Smaller tensors keep full moments, as in torchao and bitsandbytes."""
PARTS = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
"""The state of a quantized parameter, beside its step: codes and scales of both moments."""
MASTERED = ("exp_avg", "exp_avg_sq", "master")
"""The same of a small one in bfloat16, all of it in fp32."""


def make(parameters: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """The optimizer over parameters that learn.

    Raises:
        WorkloadError: parameters on a GPU, and no Triton to compile their step.
    """
    if any(p.device.type == "cuda" for p in parameters) and find_spec("triton") is None:
        raise WorkloadError(
            ["optimizer adamw-8bit compiles its step, and this torch has no Triton to do so on a GPU"],
            hint="install triton, or take adamw-fused or adafactor",
        )
    return AdamW8bit(parameters, lr=lr)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._make_constants()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy makes its own."""
        super().__setstate__(state)
        self._make_constants()

    @property
    def steps_in_place(self) -> bool:
        """Whether the next step allocates nothing, so that memory cannot run out inside it; see `step.commit`.

        Gradients of autograd's lie as their parameters do; others would be copied.
        """
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        ready = all(p in self._widened for p in parameters if _has_master(p))
        return ready and all(p.grad.stride() == p.stride() for p in parameters)

    def _make_constants(self) -> None:
        self._constants: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._widened: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Places for the gradients of parameters that have masters, in fp32."""
        if not hasattr(self, "_numbers"):  # loading a state does not change them, however groups were arranged since
            self._numbers: dict[torch.nn.Parameter, int] = {}
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self._numbers.setdefault(parameter, len(self._numbers))
        for device in {p.device for group in self.param_groups for p in group["params"]}:
            self._constants_on(device)

    def _constants_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of codes, and a place for the number of the step; made with the optimizer, not inside a step."""
        if device not in self._constants:
            self._constants[device] = (tables(device), torch.zeros((), device=device))
        return self._constants[device]

    def _init_group(self, group: dict[str, Any]) -> None:
        """The state of the parameters that have a gradient; called before the first step, so that it is secured."""
        for parameter in group["params"]:
            if parameter.grad is not None and _has_master(parameter) and parameter not in self._widened:
                self._widened[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.grad is None or self.state[parameter]:
                continue
            state: dict[str, Any] = {"step": torch.tensor(0.0)}
            for name in ("exp_avg", "exp_avg_sq"):
                if _is_quantized(parameter):
                    state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                    num_blocks = parameter.numel() // BLOCK
                    state[f"{name}_scale"] = torch.zeros(num_blocks, device=parameter.device)
                else:
                    wide = torch.float32 if _has_master(parameter) else parameter.dtype
                    state[name] = torch.zeros_like(parameter, dtype=wide)
            if _has_master(parameter):
                state["master"] = parameter.detach().float()
            self.state[parameter].update(state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            self._init_group(group)
            small: dict[tuple[torch.device, torch.dtype, float], list[Any]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] += 1
                if _is_quantized(parameter):
                    self._step_quantized(parameter, group)
                else:
                    key = (parameter.device, parameter.dtype, float(state["step"]))
                    small.setdefault(key, []).append(parameter)
            for (device, _, step), parameters in small.items():
                self._step_small(parameters, group, self._constants_on(device)[1].fill_(step))
        return loss

    def _step_quantized(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        (beta1, beta2), step, lr = group["betas"], float(state["step"]), float(group["lr"])
        eight_bit_step(
            parameter,
            parameter.grad.contiguous(),  # type: ignore[union-attr]
            *(state[part] for part in PARTS),
            self._constants_on(parameter.device)[0],
            lr,
            1 - lr * group["weight_decay"],
            1 - beta1,
            1 - beta2,
            group["eps"],
            1 - beta1**step,
            (1 - beta2**step) ** 0.5,
            seed=_seed(self._numbers.setdefault(parameter, len(self._numbers)), int(step))
            if parameter.dtype == torch.bfloat16
            else 0,
        )

    def _step_small(self, parameters: list[Any], group: dict[str, Any], step: torch.Tensor) -> None:
        states = [self.state[p] for p in parameters]
        torch._fused_adamw_(
            [state.get("master", p) for p, state in zip(parameters, states, strict=True)],
            [self._gradient(p) for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [step] * len(parameters),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        for parameter, state in zip(parameters, states, strict=True):
            if "master" in state:
                parameter.copy_(state["master"])

    def _gradient(self, parameter: Any) -> torch.Tensor:
        """In the type and the layout of what is stepped."""
        gradient: torch.Tensor = parameter.grad
        if _has_master(parameter):
            return self._widened[parameter].copy_(gradient)
        return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a `state_dict` was taken.

        torch would turn codes and scales into the parameter's type: it is not shown them.

        Raises:
            WorkloadError: the state of another optimizer.
        """
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        shown, parts = dict(state_dict["state"]), {}
        for number, parameter in zip(numbers, parameters, strict=False):  # torch says so where they are not as many
            hidden = PARTS if _is_quantized(parameter) else MASTERED if _has_master(parameter) else ()
            if number in shown and hidden:
                saved = shown[number]
                if not set(hidden) <= set(saved):
                    lacks = "its moments have no scales" if hidden is PARTS else "small weights have no masters"
                    raise WorkloadError([f"the state to load is not that of adamw-8bit: {lacks}"])
                parts[parameter] = {part: saved[part].to(parameter.device, copy=True) for part in hidden}
                shown[number] = {name: value for name, value in saved.items() if name not in hidden}
        super().load_state_dict({**state_dict, "state": shown})
        for parameter, saved in parts.items():
            self.state[parameter].update(saved)


def _is_quantized(parameter: torch.Tensor) -> bool:
    return parameter.numel() >= LEAST_QUANTIZED and parameter.numel() % BLOCK == 0 and parameter.is_contiguous()


def _has_master(parameter: torch.Tensor) -> bool:
    return parameter.dtype == torch.bfloat16 and not _is_quantized(parameter)


def _seed(number: int, step: int) -> int:
    """Another for every parameter and every step; not zero, which is none."""
    return (number * 0x9E3779B1 + step * 0x85EBCA6B) % (2**31 - 1) + 1
