"""The server: workers for each model, a socket, and the application on it until it is told to stop.

Several models share one budget: each gets what it needs at least, and the rest is divided so that all have batches of
as many tokens.
"""

import asyncio
import multiprocessing
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import Any

from vramfit.errors import NoPlanFits, VramfitError, WorkloadError
from vramfit.listening import Server, listen, url_of
from vramfit.listening.connections import most_connections
from vramfit.serve.app import App, Metrics
from vramfit.serve.pool import START_S, Failed, Pool, Ready, error_of
from vramfit.serve.settings import STOP_S, Need, ServeSettings
from vramfit.units import format_bytes, parse_bytes


def shared(models: Mapping[str, ServeSettings]) -> dict[str, ServeSettings]:
    """Settings in which each model has its share of the memory; one model keeps all of it.

    Raises:
        WorkloadError: several models, and no memory to share.
        NoPlanFits: the memory does not hold all of them with a text each.
    """
    if len(models) == 1:
        return dict(models)
    memories = {settings.memory for settings in models.values()}
    memory = memories.pop()
    if memory is None:
        raise WorkloadError([f"{len(models)} models need memory: how much they share, such as 2GiB"])
    total = parse_bytes(memory, name="memory")
    found = _elsewhere(list(models.values()))
    if isinstance(found, Failed):
        raise error_of(found)
    sharers = [settings.most_sharers for settings in models.values()]
    shares = divide(total, list(models), [need.times(n) for need, n in zip(found, sharers, strict=True)])
    return {name: replace(settings, memory=shares[name]) for name, settings in models.items()}


def _elsewhere(models: Sequence[ServeSettings]) -> list[Need] | Failed:
    """`needs_of` in a process of its own: torch stays out of this one."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as worker:
            return worker.submit(needs_of, models).result(START_S)
    except BrokenProcessPool:
        return Failed("the process that plans the models' shares ended", "its last words are above", 1)
    except TimeoutError:
        return Failed(f"the models' shares were not planned within {START_S:.0f} s", None, 1)


def divide(total_bytes: int, names: Sequence[str], needs: Sequence[Need]) -> dict[str, int]:
    """Each model's share: what it takes at least, and of the rest what as many tokens take with each of them.

    Raises:
        NoPlanFits: they take more together.

    >>> divide(1000, ["a", "b"], [Need(300, 1.0), Need(400, 2.0)])
    {'a': 400, 'b': 600}
    """
    least = sum(need.least_bytes for need in needs)
    if least > total_bytes:
        each = ", ".join(f"{name} {format_bytes(need.least_bytes)}" for name, need in zip(names, needs, strict=True))
        raise NoPlanFits(
            f"the models take {format_bytes(least)} with one text each ({each}), and {format_bytes(total_bytes)} is "
            "what they share",
            budget_bytes=total_bytes,
            shortfall_bytes=least - total_bytes,
            hint="give more --memory, serve fewer models, cut the texts (--seq), or take --precision bf16",
        )
    a_token = sum(need.token_bytes for need in needs)
    rest = total_bytes - least
    return {
        name: need.least_bytes + int(rest * need.token_bytes / a_token) for name, need in zip(names, needs, strict=True)
    }


def needs_of(models: Sequence[ServeSettings]) -> list[Need] | Failed:
    """What each model takes; in a process of its own, as it imports torch."""
    from vramfit.quiet import CHATTY, hush
    from vramfit.serve.loading import need_of

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the server's
    hush(*CHATTY)
    try:
        return [need_of(settings) for settings in models]
    except VramfitError as error:
        return Failed(str(error), error.hint, error.exit_code)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """Where a server listens, and to whom."""

    host: str = "127.0.0.1"
    """Loopback unless asked otherwise; a container needs 0.0.0.0."""
    port: int = 8080
    """0 takes any that is free."""
    api_key: str | None = field(default=None, repr=False)
    """What requests have to show; None answers everybody."""

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise WorkloadError(["the API key has characters that no header has"], hint="take letters and digits")
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise WorkloadError(
                ["the API key is empty, or begins or ends with a space"], hint="leave it out, or give one"
            )


def serve(
    models: Mapping[str, ServeSettings],
    front: Front,
    *,
    on_listening: Callable[[], None] = lambda: None,
    on_ready: Callable[[str, dict[str, list[Ready]]], None] = lambda url, workers: None,
) -> Served:
    """Serve models until interrupted or told to stop; whatever has been accepted by then is answered.

    Args:
        models: name → the model, and how it is run. Several share the memory that each of them names.
        front: where, and to whom.
        on_listening: called once the port is had, before a model is loaded.
        on_ready: called with the address and the workers of each model once answers can be given.

    Raises:
        NoPlanFits: a worker's share of the memory does not hold the model and one text.
        CheckpointError, UnknownModel, WorkloadError, VramfitError: the model, or a port that cannot be had.
    """
    bound = listen(front.host, front.port)
    on_listening()
    metrics = Metrics()
    usual: Any = signal.signal(signal.SIGTERM, _interrupt)
    pools: dict[str, Pool] = {}
    try:
        most = most_connections() // 2 // len(models)  # /ping needs a connection, too
        for name, settings in shared(models).items():
            waits = replace(settings, max_waiting=max(min(settings.max_waiting, most), 1))
            pools[name] = Pool(waits, metrics.restarts.inc)
            pools[name].launch()
        workers = {name: pool.begin() for name, pool in pools.items()}
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # uvicorn raises it once more when it has stopped
        on_ready(url_of(front.host, bound), workers)
        timeout_s = max(settings.timeout_s for settings in models.values())
        _Server(list(pools.values()), App(pools, metrics, timeout_s, front.api_key)).run(sockets=[bound])
    finally:
        for pool in pools.values():
            pool.stop()
        bound.close()
        signal.signal(signal.SIGTERM, usual)
    return Served(metrics.total("accepted"), metrics.total("answered"))


class _Server(Server):
    """Stops as any; what still waits after a while is told to come again."""

    def __init__(self, pools: list[Pool], app: App) -> None:
        super().__init__(
            app, keep_alive_s=KEEP_ALIVE_S, stop_s=STOP_S + LAST_ANSWERS_S, last_calls_s=LAST_CALLS_S, lifespan="off"
        )
        self._pools = pools

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(STOP_S, pool.give_up) for pool in self._pools]
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()


def _interrupt(number: int, frame: Any) -> None:
    """SIGTERM while the model is loaded ends it as Ctrl-C does."""
    raise KeyboardInterrupt
