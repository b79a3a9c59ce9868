"""Ctrl-C waits for the end of what must be whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted(*signals: signal.Signals) -> Iterator[None]:
    """Inside, an interrupt is kept, and delivered at the end; outside the main thread none arrives anyway.

    Args:
        signals: what is kept; SIGINT alone without.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    kept = signals or (signal.SIGINT,)
    usual: dict[int, Any] = {number: signal.signal(number, lambda n, frame: arrived.append(n)) for number in kept}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)
