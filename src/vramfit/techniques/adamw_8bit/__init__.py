"""adamw-8bit: AdamW whose moments take a byte a weight and a scale for each block of 256.

The moments are those of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), as torchao and bitsandbytes
keep them. The step of a matrix is one kernel (`eight_bit_step`): it takes no memory of its own, and nothing has to be
compiled for a shape. Small tensors keep full moments and are stepped together by torch's fused kernel.

Weights in bfloat16 are too coarse for small updates: matrices are rounded by chance, so that updates count on average,
and small tensors have masters in fp32.
"""

from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.errors import WorkloadError

BLOCK = 256
"""Weights that share a scale."""
LEAST_SCALE = 1e-12
PIECE = 4096 * BLOCK
"""Weights stepped at once on a CPU, whose temporaries are some times as large."""
SPREAD, MIX1, MIX2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
"""Of the hash: the golden ratio, and the multipliers of "lowbias32" (Wellons, hash-prospector)."""

_LIBRARY: Any = torch.library.Library("vramfit", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "eight_bit_step(Tensor(a!) weight, Tensor grad, Tensor(b!) average, Tensor(c!) average_scale, "
    "Tensor(d!) square, Tensor(e!) square_scale, Tensor tables, float lr, float kept, float new_average, "
    "float new_square, float eps, float correction1, float correction2, *, int seed=0) -> ()"
)


def tables(device: torch.device) -> torch.Tensor:
    """Four rows of 256: the values of codes and the boundaries between them, with a sign (first moment) and without.

    A value becomes the number of boundaries that it reaches; the last of a row is never reached. A second moment that
    is not zero never becomes zero: divided by it, a first moment that lives on would be a huge step. (torchao rounds
    it to zero.)
    """
    made = _host_tables()
    return torch.empty_like(made, device=device) if device.type == "meta" else made.to(device, copy=True)


@cache
def _host_tables() -> torch.Tensor:
    rows = []
    with _disable_current_modes():
        for signed in (True, False):
            values = torch.tensor(code_values(signed), dtype=torch.float32)
            rows += [values, torch.cat([(values[:-1] + values[1:]) / 2, torch.tensor([torch.inf])])]
        made = torch.stack(rows)
        made[3, 0] = torch.finfo(torch.float32).tiny
        return made


@cache
def code_values(signed: bool) -> tuple[float, ...]:
    """The dynamic map (arXiv 1511.04561): seven decades, each with twice the values of the one below; zero and one."""
    values = [0.0, 1.0]
    for decade in range(7):
        num_values = 2 ** (decade + (0 if signed else 1))
        bounds = torch.linspace(0.1, 1, num_values + 1)
        middles = (10.0 ** (decade - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        values += middles
        values += [-value for value in middles] if signed else []
    return tuple(sorted(values))


def _on_cpu(
    weight: torch.Tensor,
    grad: torch.Tensor,
    average: torch.Tensor,
    average_scale: torch.Tensor,
    square: torch.Tensor,
    square_scale: torch.Tensor,
    tables: torch.Tensor,
    *settings: float,
    seed: int = 0,
) -> None:
    flat = [t.view(-1) for t in (weight, grad, average, square)]
    for begin in range(0, weight.numel(), PIECE):
        w, g, m, v = (t[begin : begin + PIECE].view(-1, BLOCK) for t in flat)
        blocks = slice(begin // BLOCK, (begin + PIECE) // BLOCK)
        stepped = _step_blocks(w, g, (m, average_scale[blocks]), (v, square_scale[blocks]), tables, *settings)
        w.copy_(by_chance(stepped, seed, begin) if seed and weight.dtype == torch.bfloat16 else stepped)


def _step_blocks(
    weight: torch.Tensor,
    grad: torch.Tensor,
    average: tuple[torch.Tensor, torch.Tensor],
    square: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    *settings: float,
) -> torch.Tensor:
    """The weights after the step, in fp32; moments are rounded after they have been used.

    So a first step is that of AdamW. What is near one or zero comes as it is needed: `kept` is what decay leaves of a
    weight, `new_average` and `new_square` the shares of the gradient and of its square. In fp32, 1 - 0.999 would be off
    by 5e-5.
    """
    lr, kept, new_average, new_square, eps, correction1, correction2 = settings
    g = grad.float()
    m = _read(average, tables[0]).lerp_(g, new_average)
    v = _read(square, tables[2]).lerp_(g.square(), new_square)
    _write(m, average, tables[1])
    _write(v, square, tables[3])
    w = weight.float().mul(kept)
    return w.addcdiv_(m.div_(correction1), v.sqrt_().div_(correction2).add_(eps), value=-lr)


def by_chance(value: torch.Tensor, seed: int, begin: int) -> torch.Tensor:
    """Numbers of fp32 that bfloat16 has, each the one above or below, the nearer the likelier.

    Args:
        seed: of the chance.
        begin: the place of the first number, since chance goes by places.
    """
    at = torch.arange(begin, begin + value.numel(), device=value.device).view(value.shape)
    x = (at * SPREAD + seed) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * MIX1) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * MIX2) & 0xFFFFFFFF
    chance = ((x ^ (x >> 16)) >> 16).int()
    rounded = ((value.view(torch.int32) + chance) & -0x10000).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value)


def _read(moment: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    codes, scale = moment
    return values[codes.int()].mul_(scale[:, None])


def _write(value: torch.Tensor, moment: tuple[torch.Tensor, torch.Tensor], boundaries: torch.Tensor) -> None:
    codes, scale = moment
    scale.copy_(value.abs().amax(1).clamp_min_(LEAST_SCALE))
    codes.copy_(torch.bucketize(value / scale[:, None], boundaries, right=True))


def _on_gpu(*arguments: Any, seed: int = 0) -> None:
    from vramfit.techniques.adamw_8bit.kernel import launch

    launch(*arguments, seed=seed)


_LIBRARY.impl("eight_bit_step", _on_cpu, "CPU")
_LIBRARY.impl("eight_bit_step", _on_gpu, "CUDA")
_LIBRARY.impl("eight_bit_step", lambda *arguments, **settings: None, "Meta")
eight_bit_step = torch.ops.vramfit.eight_bit_step.default


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
