"""`StepCourse`: how a step of a run really went, request by request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FILE_NAME = "step.json"
"""In the folder of a run."""
MAX_POINTS = 192


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCourse:
    """What live tensors asked for over one step that was run."""

    step: int
    """Its number in the run."""
    device: str
    batch: int
    micro_batch: int
    """Samples of its length in a forward pass."""
    seq: int
    """Tokens a sequence, padding included."""
    num_events: int
    """Requests and frees."""
    requested_bytes: tuple[int, ...] = field(repr=False)
    """The most in each of equal stretches of events."""
    lengths: tuple[int, ...] = field(default=(), repr=False)
    """Tokens of each sequence where nothing was padded; `micro_batch` times `seq` is then what a pass may hold."""

    @property
    def size(self) -> dict[str, Any]:
        """The fields of a workload that has this step's size: to the token, or to less than a sequence of `seq`."""
        num_tokens, seq = sum(self.lengths), self.seq
        if not self.lengths:
            return {"batch": self.batch, "micro_batch": self.micro_batch, "seq": seq, "accumulate": None}
        if num_tokens <= self.micro_batch * seq:
            return {"batch": self.batch, "micro_batch": None, "seq": seq, "accumulate": 1, "lengths": self.lengths}
        batch = -(-num_tokens // seq)
        return {"batch": batch, "micro_batch": self.micro_batch, "seq": seq, "accumulate": None}


def sample(course: Sequence[int], num_points: int = MAX_POINTS) -> tuple[int, ...]:
    """A course in equal stretches, the highest point of each.

    >>> sample([1, 5, 2, 2, 9, 3], 3)
    (5, 2, 9)
    """
    num = min(num_points, len(course))
    return tuple(max(course[i * len(course) // num : (i + 1) * len(course) // num]) for i in range(num))
