"""`StepCourse`: how a step of a run really went, request by request."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    requested_bytes: tuple[int, ...]
    """The most in each of equal stretches of events."""


def sample(course: Sequence[int], num_points: int = MAX_POINTS) -> tuple[int, ...]:
    """A course in equal stretches, the highest point of each.

    >>> sample([1, 5, 2, 2, 9, 3], 3)
    (5, 2, 9)
    """
    num = min(num_points, len(course))
    return tuple(max(course[i * len(course) // num : (i + 1) * len(course) // num]) for i in range(num))
