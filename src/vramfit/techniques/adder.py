"""`Adder`: a thread that adds gradients to their sums in host memory as they arrive, while the device goes on."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch


class Adder:
    """Does what it is given, one after another, each when its event has come to pass."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._failures: list[BaseException] = []
        arguments = (self._queue, self._failures.append)  # not itself: it ends with its last reference
        Thread(target=_add_all, args=arguments, daemon=True, name="vramfit gradients").start()

    def put(self, arrived: Any, add: Callable[[], None]) -> None:
        """Add when the event has come to pass."""
        self._queue.put((arrived, add))

    def wait(self) -> None:
        """Until everything that was put has been added."""
        done: SimpleQueue[None] = SimpleQueue()
        self._queue.put(done)
        done.get()
        if self._failures:
            failure = self._failures[0]
            self._failures.clear()
            raise failure

    def __del__(self) -> None:
        self._queue.put(None)


def _add_all(queue: "SimpleQueue[Any]", fail: Callable[[BaseException], None]) -> None:
    while (item := queue.get()) is not None:
        if isinstance(item, SimpleQueue):
            item.put(None)
            continue
        arrived, add = item
        try:
            arrived.synchronize()
            with torch.no_grad():
                add()
        except BaseException as error:
            fail(error)
        del item, arrived, add
