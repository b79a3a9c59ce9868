"""Time turned back: the generators that dropout draws from."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators that dropout draws from, at one moment."""

    host: torch.Tensor
    devices: tuple[Any, ...]

    @staticmethod
    def now() -> "RandomState":
        """The state before a window."""
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        return RandomState(torch.get_rng_state(), tuple(devices))

    def restore(self) -> None:
        """Turn the generators back."""
        torch.set_rng_state(self.host)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
