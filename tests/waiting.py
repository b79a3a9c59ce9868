"""Waiting in tests: every wait has a limit, and none waits for a process that has ended.

The limits are there against hanging, not to measure anything: they are minutes, and a slow machine never meets them.
This is the one file of the tests that reads a clock (`tests/test_no_clock_in_tests.py`).
"""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LIMIT_S = 300.0
"""Longer than anything takes that a test waits for; shorter than the limit of a whole test in pyproject.toml."""
PAUSE_S = 0.01


def wait_until(is_so: Callable[[], Any], what: str, *, child: Any = None, limit_s: float = LIMIT_S) -> Any:
    """Until something is so; gives what it was.

    Args:
        is_so: asked again and again.
        what: is waited for, in words.
        child: a process that has to be there for it; anything with `poll()`.

    Raises:
        AssertionError: the child has ended first.
        TimeoutError: it has not come.
    """
    until = time.monotonic() + limit_s
    while True:
        code = None if child is None else child.poll()  # before the look: what it did last counts
        found = is_so()
        if found:
            return found
        assert code is None, f"the process ended with {code} before this: {what}"
        if time.monotonic() > until:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(PAUSE_S)


@contextmanager
def ended_in_time(process: "subprocess.Popen[Any]", *, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Inside, a process that hangs is killed after a while: whoever reads what it says comes to the end of it."""
    alarm = threading.Timer(limit_s, process.kill)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


@contextmanager
def running(command: list[str], *, start: Any = subprocess.Popen, **options: Any) -> Iterator[Any]:
    """A process for a block: it does not outlive the block, nor the limit.

    Args:
        start: `WarmProcess` of `tests/warm.py` where the process need not import everything itself.
    """
    with start(command, text=True, **options) as process:
        try:
            with ended_in_time(process):
                yield process
        finally:
            process.kill()


def stop(process: "subprocess.Popen[Any]") -> None:
    """End a process politely, and otherwise where it does not listen."""
    process.terminate()
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(LIMIT_S)
        raise
