"""Time turned back: the generators that dropout, and whatever else a model draws, draw from."""

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators of torch, Python and numpy, at one moment."""

    host: torch.Tensor
    devices: tuple[Any, ...]
    python: Any
    numpy: Any

    @staticmethod
    def now() -> "RandomState":
        """The state before a window."""
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        numpy = sys.modules.get("numpy")
        return RandomState(
            host=torch.get_rng_state(),
            devices=tuple(devices),
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
        )

    def restore(self) -> None:
        """Turn the generators back."""
        torch.set_rng_state(self.host)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
