"""Signals that wait for the end of a step; the run then writes a checkpoint and says how to go on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vramfit.errors import VramfitError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(VramfitError):
    """Ctrl-C: the run has written a checkpoint and ended."""

    exit_code = 128 + signal.SIGINT


class Terminated(Interrupted):
    """The system asked the run to end; it has written a checkpoint."""

    exit_code = 128 + signal.SIGTERM


class StopRequest:
    """Whether a signal has come, and which."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler: the first signal is noted, a second one ends the run at once."""
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number

    def error(self, step: int) -> Interrupted:
        """What to raise once the checkpoint of a step is written."""
        kind = Terminated if self.number == signal.SIGTERM else Interrupted
        word = "Terminated" if self.number == signal.SIGTERM else "Interrupted"
        return kind(
            f"{word} after step {step:,}; its checkpoint is saved",
            hint="go on from there: the same command with --resume (resume=True)",
        )


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Inside, Ctrl-C and a polite kill are noted; outside the main thread none arrives."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    usual: dict[signal.Signals, Any] = {number: signal.signal(number, request) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
