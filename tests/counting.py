"""Work that is counted, where a time would say as much of the machine: calls, and bytes read."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def num_calls(function: Callable[[], Any]) -> int:
    """Calls of functions that this one makes, Python's own among them; the same each time it does the same."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def num_bytes_read(function: Callable[[], Any]) -> int:
    """What this process reads meanwhile, from files and all else (Linux)."""
    before = _read_so_far()
    function()
    return _read_so_far() - before


def _read_so_far() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])
