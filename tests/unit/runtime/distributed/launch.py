"""Ranks as processes of this machine, forked from a server that has imported everything; none outlives its test."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.waiting import LIMIT_S

from vramfit.runtime.distributed.processes import COLLECTIVE_TIMEOUT_S

PRELOADED = [
    "torch.distributed.fsdp",
    "torchao",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "vramfit.runtime.stepper",
    "tests.unit.runtime.distributed.work",
]


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what it gave, or what it raised."""

    value: Any = None
    error: str = ""
    """The name of the error's class and its message."""
    trace: str = ""
    exit_code: int | None = None


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any, **keywords: Any) -> list[Ended]:
    """Call a function as every rank of a world; gives how each ended.

    A collective that one rank does not come to lets the others wait for longer than the limit here: whoever ends with
    a word has been told by a vote or by a connection that broke.

    Raises:
        TimeoutError: some rank hangs; all are ended.
    """
    assert LIMIT_S < COLLECTIVE_TIMEOUT_S
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes, processes = [], []
    with reserved_port() as port:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_be, args=(theirs, rank, size, port, function, arguments, keywords))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], processes: list[Any]) -> list[Ended]:
    ended: dict[int, Ended] = {}
    while len(ended) < len(pipes):
        open_pipes = [p for i, p in enumerate(pipes) if i not in ended]
        ready = wait(open_pipes, timeout=LIMIT_S)
        if not ready:
            missing = [i for i in range(len(pipes)) if i not in ended]
            raise TimeoutError(f"ranks {missing} hang; the others: {ended}")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                found: Ended = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join()
                found = Ended(exit_code=processes[rank].exitcode)
            ended[rank] = found
    return [ended[rank] for rank in range(len(pipes))]


def _be(
    pipe: Connection, rank: int, size: int, port: int, function: Any, arguments: Any, keywords: dict[str, Any]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    torch.set_num_threads(1)
    try:
        value = function(*arguments, **keywords)
        ended = Ended(value=value)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        ended = Ended(error=text, trace=traceback.format_exc())
    pipe.send(ended)
    pipe.close()
    os._exit(0)  # without waiting for anybody


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else gets meanwhile: this socket has it, does not listen, and shares it with one that does."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("127.0.0.1", 0))
        yield int(found.getsockname()[1])
