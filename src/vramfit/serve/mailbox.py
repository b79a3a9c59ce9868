"""`Mailbox`: results that other threads have, given to futures of an event loop, many at one waking of it."""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


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
