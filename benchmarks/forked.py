"""Work in a fresh process without importing everything again: the parent imports, never touches the GPU, and forks.

A child begins with a CUDA context of its own and leaves nothing behind; it dies with its parent.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
GPU = multiprocessing.get_context("fork").Lock()
"""Children that make their models side by side take it for what is measured."""


def import_all() -> None:
    """What children need, so that they do not import it again; starts no threads and no CUDA."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask whether there is a GPU would start CUDA
    import torch
    import transformers  # noqa: F401

    import vramfit.loader.load
    import vramfit.planner.plan
    import vramfit.runtime.measurement
    import vramfit.runtime.stepper
    import vramfit.techniques.optimizers  # noqa: F401

    torch.set_num_threads(1)


def head() -> dict[str, Any]:
    """What a results file begins with; asked in a child, since it starts CUDA."""
    import torch
    import transformers

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def read_lines(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The cases of a file of JSON lines, each as it was last tried; a line that was cut off is left out."""
    found = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        found[tuple(line[key] for key in keys)] = line
    return list(found.values())


class Child:
    """A function that runs in a process of its own."""

    def __init__(self, function: Callable[..., dict[str, Any]], *arguments: Any, **keywords: Any) -> None:
        self.start_s = time.monotonic()
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_answer, args=(theirs, os.getpid(), function, arguments, keywords))
        self._process.start()
        theirs.close()

    def fileno(self) -> int:
        """What becomes readable when the function is through."""
        return self._pipe.fileno()

    def result(self, timeout_s: float) -> dict[str, Any]:
        """What the function gives; or `error`."""
        try:
            if not self._pipe.poll(timeout_s):
                return {"error": f"took longer than {timeout_s:.0f} s"}
            answer: dict[str, Any] = self._pipe.recv()
            return answer
        except EOFError:
            self._process.join()
            return {"error": f"exit {self._process.exitcode}"}
        finally:
            self._process.kill()
            self._process.join()


def in_child(function: Callable[..., dict[str, Any]], *arguments: Any, timeout_s: float) -> dict[str, Any]:
    """What the function gives, called in a process of its own; or `error`."""
    return Child(function, *arguments).result(timeout_s)


def in_children(
    function: Callable[..., dict[str, Any]], cases: Iterable[tuple[Any, ...]], *, num_processes: int, timeout_s: float
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Each case beside what the function gives for it, as they end: so many run at once, each in its own process."""
    waiting = iter(cases)
    running: dict[Child, tuple[Any, ...]] = {}
    while True:
        while len(running) < num_processes and (case := next(waiting, None)) is not None:
            running[Child(function, *case)] = case
        if not running:
            return
        wait(list(running), timeout=1.0)
        for child in list(running):
            is_late = time.monotonic() > child.start_s + timeout_s
            if is_late or wait([child], timeout=0):
                found = child.result(0.0)
                yield running.pop(child), {"error": f"took longer than {timeout_s:.0f} s"} if is_late else found


def _answer(
    pipe: Connection,
    parent: int,
    function: Callable[..., dict[str, Any]],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it was gone before we asked
    try:
        pipe.send(function(*arguments, **keywords))
    except Exception:
        pipe.send({"error": traceback.format_exc()[-800:]})
