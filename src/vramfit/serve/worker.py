"""The life of a worker process: rounds of requests come through a pipe, answers go back as they are made.

One thread reads and tokenizes the next round while the main one computes. Whatever goes wrong in a way that nobody
foresaw ends the process; the pool starts another and tries again.
"""

import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from vramfit.errors import VramfitError
from vramfit.quiet import CHATTY, hush
from vramfit.serve.settings import ServeSettings

GONE = None
"""Stands for the end of the pipe."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker can answer."""

    task: str
    device: str
    max_length: int
    max_tokens: int
    budget_bytes: int | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker cannot start."""

    error: str
    hint: str | None
    exit_code: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A worker has a round in its hands: if it ends now, that may be why."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a worker has done so far, sent at the end of each round."""

    num_batches: int
    num_tokens: int
    num_recoveries: int
    max_tokens: int
    memory_bytes: int
    """The reserved peak of a GPU; on a CPU what the process holds."""


def work(pipe: Connection, settings: ServeSettings, number: int) -> None:
    """Load the model, say so, and answer until the pipe ends."""
    for one in (signal.SIGINT, signal.SIGTERM):  # both are the server's: it ends the pipe
        signal.signal(one, signal.SIG_IGN)
    hush(*CHATTY)
    try:
        engine = _engine(settings, number)
    except VramfitError as error:
        pipe.send(Failed(str(error), error.hint, error.exit_code))
        return
    ready = Ready(engine.task, engine.run_device.name, engine.max_length, engine.max_tokens, engine.budget_bytes)
    gc.collect()
    gc.freeze()  # what is there now stays: collecting after memory has run out need not look at it
    pipe.send(ready)
    rounds: queue.Queue[Any] = queue.Queue(maxsize=1)
    one_at_a_time = threading.Lock()

    def say(something: Any) -> None:
        with one_at_a_time:
            pipe.send(something)

    threading.Thread(target=_read, args=(pipe, engine, rounds, say), daemon=True).start()
    while (next_round := rounds.get()) is not GONE:
        engine.run(next_round, say)
        say(_figures(engine))


def _engine(settings: ServeSettings, number: int) -> Any:
    import torch

    from vramfit.serve.engine import Engine
    from vramfit.serve.loading import load_model

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.num_workers))
    engine = Engine(load_model(settings, number))
    if engine.run_device.has_budget:
        engine.rehearse()
    return engine


def _read(pipe: Connection, engine: Any, rounds: "queue.Queue[Any]", say: Callable[[Any], None]) -> None:
    try:
        while True:
            given = pipe.recv()
            say(Begun())
            rounds.put(engine.prepare(given))
    except (EOFError, OSError):
        rounds.put(GONE)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)


def _figures(engine: Any) -> Figures:
    from vramfit.monitor.sources import resident_bytes

    return Figures(
        num_batches=engine.num_batches,
        num_tokens=engine.num_tokens,
        num_recoveries=engine.num_recoveries,
        max_tokens=engine.max_tokens,
        memory_bytes=engine.run_device.reserved_bytes or resident_bytes() or 0,
    )
