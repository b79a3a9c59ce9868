"""Runs the command line as a user does: a process of its own, its output, its exit code."""

import atexit
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import torch

from tests import warm
from tests.waiting import LIMIT_S
from tests.warm import unseen

LOOKS_AT_IMPORTS = "watch"
IMPORTS_AS = {"max-batch": "estimate", "evaluate": "predict", "encode": "predict"}
"""Verbs that import what another imports: one of them begins with nothing."""
_begun: set[str] = set()


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


def vramfit(*arguments: str, stdin: str | None = None, **environment: str) -> Done:
    """Run `vramfit ARGUMENTS`, offline, in a wide terminal.

    The first command of a verb in a test run, or of one that imports the same, starts an interpreter of its own, so
    that what happens while everything is imported is seen; those after it fork a process that has imported torch,
    transformers and the verbs' modules. Where there is a GPU, no command forks: torchao begins to use CUDA when it is
    imported, and a fork of a process that has done so cannot.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "NO_COLOR": "1", **environment}
    verb = arguments[0] if arguments else ""
    command = [sys.executable, "-m", "vramfit", *arguments]
    if torch.cuda.is_available() or verb == LOOKS_AT_IMPORTS or unseen(env) or _is_first(IMPORTS_AS.get(verb, verb)):
        done = subprocess.run(command, capture_output=True, text=True, env=env, input=stdin, timeout=LIMIT_S)
    else:
        done = warm.run(command, env=env, stdin=stdin or "")
    return Done(done.returncode, done.stdout, done.stderr)


def _is_first(verb: str) -> bool:
    """Whether no command of the verb has begun yet, in any of the processes that share a test run."""
    if verb in _begun:
        return False
    _begun.add(verb)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return True
    folder = Path(gettempdir(), f"vramfit-verbs-{run}")
    folder.mkdir(exist_ok=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        Path(folder, f"verb-{verb.replace('/', '_')[:99]}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
