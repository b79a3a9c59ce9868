"""Runs the command line as a user does: a process of its own, its output, its exit code."""

import atexit
import json
import os
import select
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from tests.waiting import LIMIT_S

READ_WHEN_ASKED = frozenset(["COLUMNS", "OMP_NUM_THREADS"])
"""Variables that may be set after libraries were imported; threads are one there anyway."""
LOOKS_AT_IMPORTS = "watch"
_begun: set[str] = set()


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


def vramfit(*arguments: str, stdin: str | None = None, **environment: str) -> Done:
    """Run `vramfit ARGUMENTS`, offline, in a wide terminal.

    The first command of a verb in a test run starts an interpreter of its own, so that what happens while everything is
    imported is seen; those after it fork a process that has imported torch, transformers and the verbs' modules.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "NO_COLOR": "1", **environment}
    verb = arguments[0] if arguments else ""
    if verb == LOOKS_AT_IMPORTS or _is_first(verb) or not READ_WHEN_ASKED.issuperset(environment):
        return _start(arguments, stdin, env)
    return _fork(arguments, stdin, env)


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


def _start(arguments: tuple[str, ...], stdin: str | None, env: dict[str, str]) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "vramfit", *arguments],
        capture_output=True,
        text=True,
        env=env,
        input=stdin,
        timeout=LIMIT_S,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def _fork(arguments: tuple[str, ...], stdin: str | None, env: dict[str, str]) -> Done:
    process = _warm()
    assert process.stdin is not None
    assert process.stdout is not None
    with TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("in", "out", "err")]
        for stream in streams:
            stream.write_text(stdin or "" if stream.name == "in" else "", encoding="utf-8")
        asked = {"arguments": arguments, "environment": env, "folder": os.getcwd(), "streams": list(map(str, streams))}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], LIMIT_S)[0]:
            raise subprocess.TimeoutExpired(["vramfit", *arguments], LIMIT_S)
        code = process.stdout.readline()
        assert code, f"the process that is forked has ended with {process.wait(LIMIT_S)}"
        return Done(int(code), *(stream.read_text(encoding="utf-8") for stream in streams[1:]))


@cache
def _warm() -> "subprocess.Popen[str]":
    """The process that is forked, one for all tests; it ends when its input does."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("warm.py"))],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(process.communicate)
    return process
