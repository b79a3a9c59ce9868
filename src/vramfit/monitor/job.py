"""`JobSeen`: what a watch learns of the job by watching it, for whoever can plan one."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSeen:
    """The last call of a model."""

    model: torch.nn.Module | None = None
    """The model itself, if it still lives."""
    batch: int | None = None
    """Samples of the pass."""
    seq: int | None = None
    """Tokens of a sequence."""
    autocast: torch.dtype | None = None
    """What autocast computes in; None where it is off."""


def see_job(inputs: dict[str, Any]) -> JobSeen:
    """Batch and length from the first input that has both, the model left out."""
    tokens = next((v for v in inputs.values() if isinstance(v, torch.Tensor) and v.dim() >= 2), None)
    if tokens is None:
        return JobSeen()
    kind = tokens.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return JobSeen(batch=tokens.shape[0], seq=tokens.shape[1], autocast=autocast)
