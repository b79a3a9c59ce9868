"""`Metrics`: counts, times and memory of a server, in the text form that Prometheus reads."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
Sample = tuple[str, float]
Family = tuple[str, str, str, Iterable[Sample]]


class Metrics:
    """What has happened so far; any thread may tell."""

    def __init__(self) -> None:
        self.num_accepted = 0
        """Requests that joined the line."""
        self.num_answered = 0
        """Of these, how many were answered, in whatever words."""
        self.num_restarts = 0
        """Workers that ended unexpectedly and were replaced."""
        self._statuses: Counter[int] = Counter()
        self._buckets = [0] * (len(BUCKETS_S) + 1)
        self._sum_s = 0.0
        self._lock = threading.Lock()

    def accepted(self) -> None:
        """A request joined the line."""
        with self._lock:
            self.num_accepted += 1

    def answered(self, took_s: float) -> None:
        """A request that had joined the line was answered."""
        with self._lock:
            self.num_answered += 1
            self._sum_s += took_s
            self._buckets[bisect_left(BUCKETS_S, took_s)] += 1

    def said(self, status: int) -> None:
        """Any answer of /invocations, of those that were turned away too."""
        with self._lock:
            self._statuses[status] += 1

    def restarted(self) -> None:
        """A worker was replaced."""
        with self._lock:
            self.num_restarts += 1

    def text(self, gauges: Iterable[Family]) -> str:
        """Everything, with figures of the moment: name, kind, what it is, and samples with their labels."""
        with self._lock:
            statuses: list[Sample] = [(f'{{status="{s}"}}', n) for s, n in sorted(self._statuses.items())]
            own: list[Family] = [
                ("requests_total", "counter", "Answers of /invocations by status.", statuses),
                ("accepted_total", "counter", "Requests that joined the line.", [("", self.num_accepted)]),
                ("answered_total", "counter", "Requests that left it with an answer.", [("", self.num_answered)]),
                ("worker_restarts_total", "counter", "Workers that were replaced.", [("", self.num_restarts)]),
            ]
            lines = [line for family in (*own, *gauges) for line in _family(*family)]
            return "\n".join([*lines, *self._times(), ""])

    def _times(self) -> list[str]:
        name = "vramfit_answer_seconds"
        lines = [f"# HELP {name} From the last byte of a request to its answer.", f"# TYPE {name} histogram"]
        total = 0
        for bound, number in zip([*map(str, BUCKETS_S), "+Inf"], self._buckets, strict=True):
            total += number
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum_s:.6f}", f"{name}_count {total}"]


def _family(name: str, kind: str, what: str, samples: Iterable[Sample]) -> list[str]:
    full = f"vramfit_{name}"
    return [f"# HELP {full} {what}", f"# TYPE {full} {kind}", *(f"{full}{labels} {value}" for labels, value in samples)]
