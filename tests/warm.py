"""Processes that need not import torch and transformers first: forked from one that has (`tests/warm_server.py`).

`WarmProcess` stands for `subprocess.Popen`, and `run` for `subprocess.run`. What happens while everything is imported
is seen by processes that begin with nothing: `tests/integration/command.py` starts them.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any

from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[1]
READ_WHEN_ASKED = frozenset(
    (
        *("COLUMNS", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST", "VRAMFIT_CACHE"),
        *("SAGEMAKER_BASE_DIR", "SAGEMAKER_TRAINING_MODULE", "SM_STUDIO_LOCAL_MODE"),
    )
)
"""Variables that may be set after libraries were imported; threads are one there anyway, and no hub is asked."""
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
"""In which everything is imported."""


def unseen(environment: Mapping[str, str]) -> set[str]:
    """Variables of a command's own that would have to be set before anything is imported."""
    own = environment.items() - os.environ.items() - ENVIRONMENT.items()
    return {name for name, _ in own} - READ_WHEN_ASKED


class WarmProcess:
    """`python ARGUMENTS` with everything imported; as much of `subprocess.Popen` as tests use."""

    def __init__(
        self,
        command: list[str],
        *,
        env: Mapping[str, str] = ENVIRONMENT,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = True,
    ) -> None:
        assert command[0] == sys.executable
        assert text
        assert not unseen(env), f"a process of its own would see what this one cannot: {unseen(env)}"
        self.args = command
        self.returncode: int | None = None
        theirs: list[int] = []
        self.stdin = _stream(stdin, 0, theirs)
        self.stdout = _stream(stdout, 1, theirs)
        self.stderr = _stream(stderr, 2, theirs)
        ours, answer = socket.socketpair()
        asked = {"arguments": command[1:], "environment": dict(env), "folder": os.getcwd()}
        socket.send_fds(_server(), [json.dumps(asked).encode()], [*theirs, answer.fileno()])
        answer.close()
        for handle in theirs:
            os.close(handle)
        self._answer = ours.makefile("rb", buffering=0)
        ours.close()
        self.pid = int(self._answer.readline())

    def poll(self) -> int | None:
        """Its exit code, where it has ended."""
        return self._exit_code(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        code = self._exit_code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _exit_code(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._answer], [], [], timeout)[0]:
            self.returncode = int(self._answer.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[str | None, str | None]:
        """What it writes up to its end."""
        if self.stdin is not None:
            self.stdin.close()
        heard: list[str] = []
        listener = threading.Thread(target=lambda: heard.append(self.stderr.read() if self.stderr else ""))
        listener.start()
        out = None if self.stdout is None else self.stdout.read()
        listener.join()
        self.wait(LIMIT_S)
        return out, None if self.stderr is None else heard[0]

    def __enter__(self) -> "WarmProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.wait(LIMIT_S)
        for stream in (self.stdin, self.stdout, self.stderr, self._answer):
            if stream is not None:
                stream.close()


def run(
    command: list[str], *, env: Mapping[str, str] = ENVIRONMENT, stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run `python ARGUMENTS` to its end."""
    with tempfile.TemporaryDirectory() as folder:
        given, out, err = (Path(folder, name) for name in ("in", "out", "err"))
        given.write_text(stdin, encoding="utf-8")
        with given.open() as read, out.open("w") as written, err.open("w") as said:
            process = WarmProcess(command, env=env, stdin=read, stdout=written, stderr=said)
            with process:
                try:
                    process.wait(LIMIT_S)
                finally:
                    process.kill()
        texts = (path.read_text(encoding="utf-8") for path in (out, err))
        return subprocess.CompletedProcess(command, process.wait(), *texts)


def _stream(given: Any, number: int, theirs: list[int]) -> IO[str] | None:
    """Our end of a pipe, where one is asked for; the other process's end is added to its list."""
    if given == subprocess.PIPE:
        ends = os.pipe()
        theirs.append(ends[number > 0])
        return os.fdopen(ends[number == 0], "r" if number else "w", encoding="utf-8")
    if given == subprocess.STDOUT:
        theirs.append(os.dup(theirs[1]))
    elif given == subprocess.DEVNULL:
        theirs.append(os.open(os.devnull, os.O_RDWR))
    else:
        theirs.append(os.dup(number if given is None else given.fileno()))
    return None


@cache
def _server() -> socket.socket:
    """Where the process is asked that is forked, one for all tests; it ends when this socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm_server", str(theirs.fileno())],
        cwd=ROOT,
        env=ENVIRONMENT,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours
