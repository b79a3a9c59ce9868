"""What a long computation is doing now, passed to a listener: the command line shows it on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

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
