"""Data sets: files read and checked, tokenized once, batched by length; metrics and predictions of what comes out."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def one_ahead(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """What is made of each item, by a thread, while what was made of the one before it is in use.

    The caller's thread goes through the items.
    """
    with ThreadPoolExecutor(1) as thread:
        making: list[Future[Made]] = []
        for item in items:
            made = [one.result() for one in making]
            making = [thread.submit(make, item)]
            yield from made
        yield from (one.result() for one in making)
