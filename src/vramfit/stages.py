"""What a long computation is doing now, passed to a listener: the command line shows it on a terminal."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TypeVar

Listener = Callable[[str], None]
T = TypeVar("T")

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tell(stage: str) -> None:
    """Tell the listener what begins now, in a few words; nothing happens where there is none."""
    listener = _listener.get()
    if listener is not None:
        listener(stage)


@contextmanager
def heard(listener: Listener) -> Iterator[None]:
    """Inside, in this thread, `listener` gets what is told."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class _Stopped(BaseException):
    """Raised in a thread whose result nobody waits for any more."""


@contextmanager
def beside(call: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Inside, `call` runs in a thread; what is given waits for its end, returns its result or raises its error.

    What it tells goes to the listener of this thread. If the block is left before, by Ctrl-C or an error, the call
    ends where it tells something next: it should never wait long in between, for a pipe for example. Nor should it
    import what the block imports: of modules that import each other, two threads may see halves.

    >>> with beside(lambda: sum(range(10))) as total:
    ...     total()
    45
    """
    is_left = threading.Event()
    outer = _listener.get() or (lambda stage: None)

    def listen(stage: str) -> None:
        if is_left.is_set():
            raise _Stopped
        outer(stage)

    def run() -> T:
        with heard(listen):
            return call()

    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(copy_context().run, run)
        try:
            yield made.result
        finally:
            is_left.set()


@contextmanager
def within(whole: Callable[[], str]) -> Iterator[None]:
    """Inside, what is told goes behind a description of the whole, which is asked for anew each time.

    >>> with heard(print), within(lambda: "7 settings tried"):
    ...     tell("tracing 12 layers")
    7 settings tried, tracing 12 layers
    """
    outer = _listener.get()
    if outer is None:
        yield
        return
    with heard(lambda stage: outer(f"{whole()}, {stage}")):
        yield
