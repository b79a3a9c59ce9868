"""How requests wait: a line that workers take from by weight in tokens, and how replies reach the event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from vramfit.serve.requests import INVOCATIONS, Reply
from vramfit.serve.settings import BYTES_A_TOKEN, MAX_WAITING_BYTES

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request on its way."""

    body: bytes
    deliver: Callable[[Reply], None]
    """Takes the answer, from any thread."""
    is_wanted: Callable[[], bool]
    """Whether somebody still waits for it."""
    path: str = INVOCATIONS
    """Where it was sent to: what its body means."""
    num_deaths: int = 0
    """Workers that ended while they had it."""
    number: int = field(default_factory=count().__next__)
    """By which workers and the pool know it."""


class Full(Exception):
    """Too many are waiting."""


class RequestQueue:
    """A line of requests that several workers take from.

    Args:
        max_requests: the next one is turned away.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._requests: deque[PendingRequest] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, request: PendingRequest) -> None:
        """Join the line.

        Raises:
            Full: there is no room, or the line is closed.
        """
        with self._changed:
            too_many = (
                len(self._requests) >= self._max_requests or self._num_bytes + len(request.body) > MAX_WAITING_BYTES
            )
            if self._is_closed or (too_many and self._requests):
                raise Full
            self._requests.append(request)
            self._num_bytes += len(request.body)
            self._changed.notify()

    def put_back(self, requests: Iterable[PendingRequest]) -> None:
        """First in line again, whatever the bounds: they were let in once."""
        with self._changed:
            for request in reversed(list(requests)):
                self._requests.appendleft(request)
                self._num_bytes += len(request.body)
            self._changed.notify()

    def take(self, max_tokens: int, max_length: int) -> list[PendingRequest] | None:
        """What waits, up to a weight, one request at least; waits for it. None when the line is closed and empty.

        A request that a worker has died of comes by itself.
        """
        with self._changed:
            while True:
                taken = self._taken(max_tokens, max_length)
                if taken:
                    return taken
                if self._is_closed and not self._requests:
                    return None
                self._changed.wait()

    def close(self) -> list[PendingRequest]:
        """Nobody joins any more; gives those who wait, who are in line no longer."""
        with self._changed:
            self._is_closed = True
            left, self._requests = list(self._requests), deque()
            self._num_bytes = 0
            self._changed.notify_all()
        return left

    def _taken(self, max_tokens: int, max_length: int) -> list[PendingRequest]:
        taken: list[PendingRequest] = []
        weight = 0
        while self._requests:
            request = self._requests[0]
            num_tokens = min(len(request.body) // BYTES_A_TOKEN + 1, 4 * max_length)
            alone = request.num_deaths > 0
            if taken and (alone or weight + num_tokens > max_tokens):
                break
            self._requests.popleft()
            self._num_bytes -= len(request.body)
            if not request.is_wanted():
                continue
            taken.append(request)
            weight += num_tokens
            if alone:
                break
        return taken


class Mailbox(Generic[T]):
    """Any thread may put; the loop of a future hands it out."""

    def __init__(self) -> None:
        self._letters: deque[tuple[asyncio.Future[T], T]] = deque()
        self._is_called = False

    def put(self, future: "asyncio.Future[T]", result: T) -> None:
        """The result of a future, unless nobody waits for it by then; lost where its loop has ended."""
        self._letters.append((future, result))
        if self._is_called:
            return
        self._is_called = True
        with suppress(RuntimeError):  # the loop is closed
            future.get_loop().call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._is_called = False  # before looking: what is put from now on calls again
        while self._letters:
            future, result = self._letters.popleft()
            if not future.done():
                future.set_result(result)
