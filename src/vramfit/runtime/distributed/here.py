"""Processes of this machine, as others see them: named so that no other one is taken for them, and whether they run."""

import os
from pathlib import Path


def name_of(pid: int) -> str:
    """The machine, the process and when it began; empty where the system does not tell."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine}/{os.readlink('/proc/self/ns/pid')}/{pid}/{_status(pid)[1]}"
    except (OSError, ValueError, IndexError):
        return ""


def is_running(name: str) -> bool | None:
    """Whether a process runs, by what `name_of` gave in it; None for one of another machine."""
    where, _, began = name.rpartition("/")
    here = name_of(os.getpid())
    if not here or where.rsplit("/", 1)[0] != here.rsplit("/", 2)[0]:
        return None
    try:
        state, found = _status(int(where.rsplit("/", 1)[1]))
    except OSError:
        return False
    return found == began and state not in "ZX"  # a zombie has ended, and nobody has asked how


def _status(pid: int) -> tuple[str, str]:
    """A process's state, and when it began, in ticks since the machine did."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
