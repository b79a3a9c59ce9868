"""The server: workers, a socket, and the application on it until it is told to stop."""

import asyncio
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vramfit.listening.connections import most_connections
from vramfit.listening.server import Server, listen, url_of
from vramfit.serve.app import App, Metrics
from vramfit.serve.pool import Pool, Ready
from vramfit.serve.settings import STOP_S, ServeSettings

KEEP_ALIVE_S = 75
"""Longer than the 60 s of the load balancers in front."""
LAST_CALLS_S = 1
"""After SIGTERM: clients that keep connections open hear of the end with an answer."""
LAST_ANSWERS_S = 7
"""Beyond the time after which nothing waits any more: for what is being computed."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server did in its life."""

    num_accepted: int
    num_answered: int
    num_restarts: int


def serve(
    settings: ServeSettings,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    on_listening: Callable[[], None] = lambda: None,
    on_ready: Callable[[str, list[Ready]], None] = lambda url, workers: None,
) -> Served:
    """Serve a model until interrupted or told to stop; whatever has been accepted by then is answered.

    Args:
        settings: the model, and how it is run.
        host: loopback unless asked otherwise; a container needs 0.0.0.0.
        port: 0 takes any that is free.
        on_listening: called once the port is had, before the model is loaded.
        on_ready: called with the address and the workers once answers can be given.

    Raises:
        NoPlanFits: a worker's share of the memory does not hold the model and one text.
        CheckpointError, UnknownModel, WorkloadError, VramfitError: the model, or a port that cannot be had.
    """
    bound = listen(host, port)
    on_listening()
    metrics = Metrics()
    max_waiting = min(settings.max_waiting, most_connections() // 2)  # /ping needs a connection, too
    pool = Pool(replace(settings, max_waiting=max_waiting), metrics.restarts.inc)
    usual: Any = signal.signal(signal.SIGTERM, _interrupt)
    try:
        workers = pool.start()
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # uvicorn raises it once more when it has stopped
        on_ready(url_of(host, bound), workers)
        _Server(pool, App(pool, metrics, settings.timeout_s)).run(sockets=[bound])
    finally:
        pool.stop()
        bound.close()
        signal.signal(signal.SIGTERM, usual)
    return Served(metrics.total("accepted"), metrics.total("answered"), metrics.total("worker_restarts"))


class _Server(Server):
    """Stops as any; what still waits after a while is told to come again."""

    def __init__(self, pool: Pool, app: App) -> None:
        super().__init__(
            app,
            keep_alive_s=KEEP_ALIVE_S,
            stop_s=STOP_S + LAST_ANSWERS_S,
            last_calls_s=LAST_CALLS_S,
            lifespan="off",
        )
        self._pool = pool

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(STOP_S, self._pool.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def _interrupt(number: int, frame: Any) -> None:
    """SIGTERM while the model is loaded ends it as Ctrl-C does."""
    raise KeyboardInterrupt
