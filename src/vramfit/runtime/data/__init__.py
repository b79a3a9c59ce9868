"""Data sets: files read and checked, tokenized once, batched by length; metrics and predictions of what comes out."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def ahead(make: Callable[[Item], Made], items: Iterable[Item], num: int = 1) -> Iterator[Made]:
    """What is made of each item, in order, by so many threads, while what was made before is in use.

    The caller's thread goes through the items.
    """
    with ThreadPoolExecutor(num) as threads:
        making: deque[Future[Made]] = deque()
        for item in items:
            made = [making.popleft().result()] if len(making) == num else []
            making.append(threads.submit(make, item))
            yield from made
        yield from (one.result() for one in making)
