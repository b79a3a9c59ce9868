"""How long calls take beside each other on a machine that is shared: in turns, and by the median."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

ROUNDS = 9
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one call, each the median of all rounds."""

    wall_s: float
    cpu_s: float
    """Of all threads of this process: what others do on the machine hardly counts."""


def time_in_turns(calls: Mapping[str, Call], rounds: int = ROUNDS) -> dict[str, Took]:
    """The time of each call: all of them once without a clock, then in turns, so that load from outside hits all."""
    for call in calls.values():
        call()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: Took(*(median(column) for column in zip(*found, strict=True))) for name, found in times.items()}
