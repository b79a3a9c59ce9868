"""`Waiting`: requests in the order they came, bounded in number and bytes, taken by weight in tokens."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from vramfit.serve.limits import BYTES_A_TOKEN, MAX_WAITING_BYTES
from vramfit.serve.replies import Reply

_numbers = count()


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way."""

    number: int
    body: bytes
    deliver: Callable[[Reply], None]
    """Takes the answer, from any thread."""
    is_wanted: Callable[[], bool]
    """Whether somebody still waits for it."""
    num_deaths: int = 0
    """Workers that ended while they had it."""

    @staticmethod
    def of(body: bytes, deliver: Callable[[Reply], None], is_wanted: Callable[[], bool]) -> "Job":
        """A request that has just come."""
        return Job(next(_numbers), body, deliver, is_wanted)


class Full(Exception):
    """Too many are waiting."""


class Waiting:
    """A line of jobs that several workers take from.

    Args:
        max_jobs: the next one is turned away.
    """

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: deque[Job] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Job) -> None:
        """Join the line.

        Raises:
            Full: there is no room, or the line is closed.
        """
        with self._changed:
            too_many = len(self._jobs) >= self._max_jobs or self._num_bytes + len(job.body) > MAX_WAITING_BYTES
            if self._is_closed or (too_many and self._jobs):
                raise Full
            self._jobs.append(job)
            self._num_bytes += len(job.body)
            self._changed.notify()

    def put_back(self, jobs: Iterable[Job]) -> None:
        """First in line again, whatever the bounds: they were let in once."""
        with self._changed:
            for job in reversed(list(jobs)):
                self._jobs.appendleft(job)
                self._num_bytes += len(job.body)
            self._changed.notify()

    def take(self, max_tokens: int, max_length: int) -> list[Job] | None:
        """What waits, up to a weight, one job at least; waits for it. None when the line is closed and empty.

        A job that a worker has died of comes by itself.
        """
        with self._changed:
            while True:
                taken = self._taken(max_tokens, max_length)
                if taken:
                    return taken
                if self._is_closed and not self._jobs:
                    return None
                self._changed.wait()

    def close(self) -> list[Job]:
        """Nobody joins any more; gives those who wait, who are in line no longer."""
        with self._changed:
            self._is_closed = True
            left, self._jobs = list(self._jobs), deque()
            self._num_bytes = 0
            self._changed.notify_all()
        return left

    def _taken(self, max_tokens: int, max_length: int) -> list[Job]:
        taken: list[Job] = []
        weight = 0
        while self._jobs:
            job = self._jobs[0]
            num_tokens = min(len(job.body) // BYTES_A_TOKEN + 1, 4 * max_length)
            alone = job.num_deaths > 0
            if taken and (alone or weight + num_tokens > max_tokens):
                break
            self._jobs.popleft()
            self._num_bytes -= len(job.body)
            if not job.is_wanted():
                continue
            taken.append(job)
            weight += num_tokens
            if alone:
                break
        return taken
