"""Runs the command line as a user does: a process of its own, its output, its exit code."""

import os
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


def vramfit(*arguments: str, stdin: str | None = None, **environment: str) -> Done:
    """Run `vramfit ARGUMENTS`, offline, in a wide terminal."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "NO_COLOR": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-m", "vramfit", *arguments],
        capture_output=True,
        text=True,
        env=env,
        input=stdin,
        timeout=300,
    )
    return Done(done.returncode, done.stdout, done.stderr)
