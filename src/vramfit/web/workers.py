"""Worker processes: predictions are made there, each within its time; one that takes longer is ended.

All of them are forked from one process that has torch, transformers and a first prediction behind it, so that a new one
is there at once. Where there is no such thing (Windows), each starts from nothing.
"""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from vramfit.web.answers import Problem
from vramfit.web.queries import WALL_FACTOR, Query

Reply = tuple[int, bytes]
START_S = 120.0
_FORKSERVER = "forkserver"


def worker_context() -> BaseContext:
    """How workers are started."""
    if _FORKSERVER not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context(_FORKSERVER)
    context.set_forkserver_preload(["vramfit.web.warm"])
    return context


class Worker:
    """One process that answers queries, one after another; used from one thread at a time.

    Args:
        limit_s: seconds of computing that one answer may take.
        niceness: what it leaves to others.
    """

    def __init__(self, context: BaseContext, *, limit_s: float, niceness: int, allow_local: bool) -> None:
        self._context = context
        self._limit_s = limit_s
        self._arguments = (niceness, allow_local, limit_s)
        self._process: Any = None
        self._pipe: Connection | None = None
        self._is_closed = False

    def start(self) -> None:
        """Have a process that is ready."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, *self._arguments), daemon=True, name="vramfit-web-worker"
        )
        process.start()
        theirs.close()
        self._process, self._pipe = process, ours
        if not ours.poll(START_S):
            raise RuntimeError(f"a worker was not ready within {START_S:.0f} s")
        ours.recv()

    def ask(self, query: Query) -> Reply:
        """The answer to a query; where it takes too long or the process dies, a sentence that says so."""
        assert self._pipe is not None
        is_late = False
        try:
            self._pipe.send(query)
            if self._pipe.poll(self._limit_s * WALL_FACTOR):
                reply: Reply = self._pipe.recv()
                return reply
            is_late = True
        except (EOFError, OSError):
            pass
        self._end()
        if self._is_closed:
            return 503, _problem("the server is closing", "start it again")
        is_used_up = self._process.exitcode == -getattr(signal, "SIGPROF", 0)
        try:
            self.start()
        except (RuntimeError, OSError, EOFError) as error:  # no memory for another process: the next query tries again
            return 500, _problem(f"no process to compute in: {error}", "close other programs, or start it again")
        if is_late:
            return 503, _problem("this machine is too busy to answer in time", "ask again later")
        if is_used_up:
            text = f"no answer within {self._limit_s:.0f} s of computing"
            return 422, _problem(text, "ask for a smaller model or fewer micro-batches, or on the command line")
        return 500, _problem("the process that made the prediction ended unexpectedly", "ask again")

    def stop(self) -> None:
        """End the process for good."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)
        if self._pipe is not None:
            self._pipe.close()


def _problem(error: str, hint: str) -> bytes:
    return Problem(error=error, hint=hint).model_dump_json().encode()


def _serve(pipe: Connection, niceness: int, allow_local: bool, limit_s: float) -> None:
    """The main loop of a worker process; it ends when the server's end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's
    if not allow_local:
        os.chdir(os.sep)  # no name of the catalogue is ever taken for a folder
    if niceness and hasattr(os, "nice"):
        os.nice(niceness)
    import vramfit.web.warm  # noqa: F401
    from vramfit.web.answers import answer

    pipe.send("ready")
    while True:
        try:
            query = pipe.recv()
        except (EOFError, OSError):
            return
        _limit(limit_s)
        reply = answer(query, allow_local=allow_local)
        _limit(0)
        try:
            pipe.send(reply)
        except OSError:
            return


def _limit(seconds: float) -> None:
    """After so much computing the system ends this process; 0 for no limit."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
