"""Layers that keep state beside their weights, one for each way of keeping it, and all that such a model holds."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrizations

WIDTH = 8


class RunningStatistics(torch.nn.Module):
    """InstanceNorm counts statistics; the loss reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.InstanceNorm1d(WIDTH, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x[:, :, None].expand(-1, -1, 2) * torch.arange(1, 3, device=x.device))
        return x + normed[..., 0] + self.norm.running_mean


class MovingAverage(torch.nn.Module):
    """A buffer that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class ReplacedBuffer(torch.nn.Module):
    """A buffer that is not saved, and that every pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class OwnGenerator(torch.nn.Module):
    """Noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.generator, device=self.generator.device).to(x.device)


class Counter(torch.nn.Module):
    """A number that the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x / (1 + 0.1 * self.num_calls)


class PythonState(torch.nn.Module):
    """Lists, dicts, an object, an array, and generators of Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = [0.0]
        self.found = {"calls": [0]}
        self.own = SimpleNamespace(num_calls=0)
        self.array = np.zeros(2)
        self.plain = torch.zeros(WIDTH)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.seen[-1] + 0.1)
        self.found["calls"][0] += 1
        self.own.num_calls += 1
        self.array += 1
        self.plain += x.detach().mean(0).cpu()
        drawn = self.python.random() + self.numpy.random() + random.random() + np.random.random()
        drawn += self.seen[-1] + self.found["calls"][0] + self.own.num_calls + float(self.array.sum())
        return x * drawn + self.plain.to(x.device)


class HiddenChange(torch.nn.Module):
    """A buffer that is changed behind autograd's back: its version stays."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


KINDS: dict[str, Callable[[], torch.nn.Module]] = {
    "spectral_norm": lambda: torch.nn.utils.spectral_norm(torch.nn.Linear(WIDTH, WIDTH)),
    "parametrized spectral_norm": lambda: parametrizations.spectral_norm(torch.nn.Linear(WIDTH, WIDTH)),
    "running statistics": RunningStatistics,
    "moving average in a buffer": MovingAverage,
    "buffer that is replaced": ReplacedBuffer,
    "generator of its own": OwnGenerator,
    "counter": Counter,
    "Python's own state": PythonState,
    "buffer changed out of sight": HiddenChange,
}


class Small(torch.nn.Module):
    """Words, a layer with state, and a head."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(99, WIDTH)
        self.layer = torch.nn.Sequential(*(KINDS[kind]() for kind in kinds))
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layer(self.words(input_ids).mean(1)))
        return logits


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Weights, buffers, generators and values of a model, as plain values that can be compared."""
    found: dict[str, Any] = {name: tensor.tolist() for name, tensor in model.named_parameters()}
    found |= {name: tensor.tolist() for name, tensor in model.named_buffers()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            place = f"{path}.{name}"
            if isinstance(value, torch.Generator):
                found[place] = value.get_state().tolist()
            elif isinstance(value, random.Random):
                found[place] = value.getstate()
            elif isinstance(value, np.random.Generator):
                found[place] = value.bit_generator.state
            elif isinstance(value, np.ndarray):
                found[place] = value.tolist()
            elif isinstance(value, SimpleNamespace):
                found[place] = vars(value).copy()
            elif type(value) is torch.Tensor and value.grad_fn is None:
                found[place] = value.tolist()
            elif isinstance(value, int | float) or name in ("seen", "found"):
                found[place] = repr(value)
    return found
