"""What both servers stand on: the socket, and `Server`: uvicorn with bounded connections and a bounded log, which stops
without cutting anybody off."""

import asyncio
import logging
import socket
from time import monotonic
from typing import Any

import uvicorn

from vramfit.errors import VramfitError
from vramfit.listening.connections import CLOSE, CloseUnread, Connections, most_connections, protocol_class

BACKLOG = 2048
"""Connections that may wait to be taken."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes any that is free.

    Raises:
        VramfitError: a host that is not of this machine, or a port that is taken.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise VramfitError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="choose another --host or --port; port 0 takes any that is free",
        ) from None
    bound.setblocking(False)
    return bound


def url_of(host: str, bound: socket.socket) -> str:
    """Where it is reached."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{bound.getsockname()[1]}/"


REMARKS = 10
"""Of one kind, in one period."""
PERIOD_S = 60.0
LOGGERS = ("uvicorn.error", "asyncio")


class Sparing(logging.Filter):
    """Lets the first few remarks of a period pass; the next that passes says how many were left out.

    Remarks are of one kind where one line of code makes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._periods: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a remark is written."""
        kind, now = (record.pathname, record.lineno), monotonic()
        began, number = self._periods.get(kind, (now, 0))
        if now - began >= PERIOD_S:
            if number > REMARKS:
                record.msg = f"{record.getMessage()} ({number - REMARKS:,} more like it were left out before)"
                record.args = ()
            began, number = now, 0
        self._periods[kind] = (began, number + 1)
        return number < REMARKS


def spare_log() -> None:
    """Bound what uvicorn and asyncio write."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, Sparing) for one in logger.filters):
            logger.addFilter(Sparing())


AT_ONCE = 16
"""Connections that are taken in one turn of the event loop, before any is closed for another."""
TICKS_A_SECOND = 10
"""Of uvicorn's main loop."""


class Server(uvicorn.Server):
    """Answers with an application.

    Args:
        app: ASGI.
        keep_alive_s: until an idle connection is closed.
        stop_s: until requests in flight are given up once the server stops.
        last_calls_s: how long requests are still taken then, where connections are open; their answers say that the
            connection ends.
        options: for uvicorn's `Config`.
    """

    def __init__(
        self, app: Any, *, keep_alive_s: int, stop_s: float, last_calls_s: float = 0.0, **options: Any
    ) -> None:
        self.open = Connections(most_connections())
        self._last_calls_s = last_calls_s
        config = uvicorn.Config(
            CloseUnread(app),
            http=protocol_class(self.open),
            ws="none",
            loop="asyncio",
            backlog=AT_ONCE,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=int(stop_s),
            **options,
        )
        spare_log()
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; asyncio takes as many connections in one turn as may wait, so more wait than it knows."""
        await super().startup(sockets)
        for bound in sockets or []:
            bound.listen(BACKLOG)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        if counter % TICKS_A_SECOND == 0:
            self.open.drop_late()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is asked, last calls among it, then end all connections."""
        state, loop = self.server_state, asyncio.get_running_loop()
        state.default_headers = [*state.default_headers, CLOSE]
        for one in state.connections:
            if getattr(one, "cycle", None) is not None:
                one.cycle.default_headers = state.default_headers  # type: ignore[union-attr]
        until = loop.time() + self._last_calls_s
        while state.connections and loop.time() < until and not self.force_exit:
            await asyncio.sleep(1 / TICKS_A_SECOND)
        await super().shutdown(sockets)
