"""`Pool`: the worker processes, each with a thread that sends rounds and one that takes answers.

Two rounds are at a worker at a time: one that it computes and one that it reads. A worker that ends, or that is
silent for too long, is replaced, and what it had is tried again, each request by itself.

`work` is the life of a worker process: rounds of requests come through a pipe, answers go back as they are made. One
thread reads and tokenizes the next round while the main one computes. Whatever goes wrong in a way that nobody foresaw
ends the process; the pool starts another and tries again.
"""

import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from vramfit.errors import NoPlanFits, VramfitError, WorkloadError
from vramfit.quiet import CHATTY, hush
from vramfit.runtime.interruption import uninterrupted
from vramfit.serve.requests import Known, problem
from vramfit.serve.settings import ServeSettings
from vramfit.serve.waiting import PendingRequest, RequestQueue

START_S = 600.0
"""Until a worker has loaded its model."""
NUM_ROUNDS = 2
MAX_DEATHS = 2
"""A request that so many workers have died of is not tried again."""
SILENCE_FACTOR = 3.0
"""A worker that says nothing for so many times the time limit is ended."""
GONE = None
"""Stands for the end of the pipe."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker can answer."""

    known: Known
    """What its model is."""
    device: str
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


class Pool:
    """Workers that answer requests.

    Args:
        settings: of the server.
        on_restart: told of workers that were replaced.
    """

    def __init__(self, settings: ServeSettings, on_restart: Callable[[], None] = lambda: None) -> None:
        self.settings = settings
        self.started: list[Ready] = []
        """What each worker said first."""
        self.waiting = RequestQueue(settings.max_waiting)
        self._workers = [Worker(settings, number, self.waiting, on_restart) for number in range(settings.num_workers)]

    def launch(self) -> None:
        """Start the workers; they load the model."""
        for worker in self._workers:
            worker.launch()

    def begin(self) -> list[Ready]:
        """Wait until all workers can answer, and let requests come.

        Raises:
            VramfitError: one of them cannot.
        """
        self.started = [worker.begin() for worker in self._workers]
        return self.started

    @property
    def is_ready(self) -> bool:
        """Whether any worker can answer."""
        return any(worker.ready is not None for worker in self._workers)

    @property
    def figures(self) -> list[Figures | None]:
        """What each worker said last."""
        return [worker.figures for worker in self._workers]

    def give_up(self) -> None:
        """Tell all who still wait to come again."""
        for request in self.waiting.close():
            request.deliver(problem(503, "the server is stopping", "come again later"))

    def stop(self) -> None:
        """End the workers."""
        self.give_up()
        for worker in self._workers:
            worker.stop()


class Worker:
    """One process, and the threads that speak with it."""

    def __init__(
        self, settings: ServeSettings, number: int, waiting: RequestQueue, on_restart: Callable[[], None]
    ) -> None:
        self.ready: Ready | None = None
        self.figures: Figures | None = None
        self._settings, self._number = settings, number
        self._waiting, self._on_restart = waiting, on_restart
        self._process: Any = None
        self._pipe: Connection | None = None
        self._rounds: list[dict[int, PendingRequest]] = []
        self._num_begun = 0
        self._free = threading.Semaphore(NUM_ROUNDS)
        self._sending = threading.Lock()
        self._is_closed = False
        self._past = Figures(0, 0, 0, 0, 0)

    def launch(self) -> None:
        """Start the process; it loads the model."""
        context = multiprocessing.get_context("spawn")
        with uninterrupted(signal.SIGINT, signal.SIGTERM):  # half a process can neither be joined nor killed
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(
                target=work,
                args=(theirs, self._settings, self._number),
                daemon=True,
                name=f"vramfit-serve-{self._number}",
            )
            self._process.start()
            theirs.close()

    def begin(self) -> Ready:
        """Wait for the model, then let requests come."""
        ready = self._hear_first()
        for target in (self._send, self._take):
            threading.Thread(target=target, daemon=True).start()
        return ready

    def stop(self) -> None:
        """End the process for good."""
        self._is_closed = True
        self._end()

    def _hear_first(self) -> Ready:
        assert self._pipe is not None
        try:
            said = self._pipe.recv() if self._pipe.poll(START_S) else None
        except (EOFError, OSError):
            said = Failed("a worker ended while it loaded the model", "its last words are above", 1)
        if isinstance(said, Ready):
            self.ready = said
            return said
        self._end()
        raise error_of(said or Failed(f"a worker was not ready within {START_S:.0f} s", None, 1))

    def _send(self) -> None:
        """Give the worker what waits, whenever it has room for another round."""
        while not self._is_closed:
            self._free.acquire()
            ready = self.ready
            if ready is None:  # it is being replaced
                self._free.release()
                threading.Event().wait(0.05)
                continue
            limit = self.figures.max_tokens if self.figures is not None else ready.max_tokens
            requests = self._waiting.take(limit, ready.known.max_length)
            if requests is None:
                return
            with self._sending:
                if self.ready is None:
                    self._waiting.put_back(requests)
                    self._free.release()
                    continue
                self._rounds.append({request.number: request for request in requests})
                try:
                    assert self._pipe is not None
                    self._pipe.send([(request.number, request.path, request.body) for request in requests])
                except OSError:
                    pass  # it has just ended, as the other thread will see

    def _take(self) -> None:
        """Hand out answers, and replace the worker where it ends."""
        assert self._pipe is not None
        silence_s = SILENCE_FACTOR * self._settings.timeout_s
        while not self._is_closed:
            try:
                if not self._pipe.poll(silence_s if self._rounds else 1.0):
                    if self._rounds:
                        raise EOFError  # it hangs
                    continue
                self._hear(self._pipe.recv())
            except (EOFError, OSError):
                if not self._is_closed and not self._replace():
                    return

    def _hear(self, said: Any) -> None:
        if isinstance(said, Begun):
            self._num_begun += 1
            return
        if isinstance(said, Figures):
            past = self._past
            self.figures = Figures(
                num_batches=past.num_batches + said.num_batches,
                num_tokens=past.num_tokens + said.num_tokens,
                num_recoveries=past.num_recoveries + said.num_recoveries,
                max_tokens=said.max_tokens,
                memory_bytes=said.memory_bytes,
            )
            self._rounds.pop(0)
            self._num_begun -= 1
            self._free.release()
            return
        for number, reply in said:
            request = self._rounds[0].pop(number, None)
            if request is not None:
                request.deliver(reply)

    def _replace(self) -> bool:
        """Another process instead of one that ended; what that one had goes back into the line. Says whether it did."""
        with self._sending:
            self.ready = None
        self._end()
        with self._sending:
            rounds, self._rounds = self._rounds, []
            num_begun, self._num_begun = self._num_begun, 0
        self._past = self.figures or self._past
        self._on_restart()
        for _ in rounds:
            self._free.release()
        self._waiting.put_back([request for one in rounds[num_begun:] for request in one.values()])  # it never had them
        self._give_back([request for one in rounds[:num_begun] for request in one.values()])
        try:
            self.launch()
            self._hear_first()
        except (VramfitError, OSError):
            return False
        return True

    def _give_back(self, lost: Sequence[PendingRequest]) -> None:
        again = []
        for request in lost:
            request.num_deaths += 1
            if request.num_deaths >= MAX_DEATHS:
                text = f"the process that computed it ended {MAX_DEATHS} times"
                request.deliver(problem(500, text, "the server's log says why; other requests are not affected"))
            else:
                again.append(request)
        self._waiting.put_back(again)

    def _end(self) -> None:
        self.ready = None
        if self._pipe is not None:
            self._pipe.close()
        if self._process is None:
            return
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)


def error_of(failed: Failed) -> VramfitError:
    """Why a worker could not start, as the error that it was."""
    if failed.exit_code == NoPlanFits.exit_code:
        return NoPlanFits(failed.error, hint=failed.hint)
    if failed.exit_code == WorkloadError.exit_code:
        return WorkloadError([failed.error], hint=failed.hint)
    return VramfitError(failed.error, hint=failed.hint)


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
    ready = Ready(engine.known, engine.run_device.name, engine.max_tokens, engine.budget_bytes)
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

    from vramfit.serve.engine import open_engine

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.num_workers))
    return open_engine(settings, number)


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
