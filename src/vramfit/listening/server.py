"""`Server`: uvicorn with bounded connections and a bounded log, which stops without cutting anybody off."""

import asyncio
import socket
from typing import Any

import uvicorn

from vramfit.listening.connections import Connections, most_connections
from vramfit.listening.log import spare_log
from vramfit.listening.protocol import protocol_class
from vramfit.listening.sockets import BACKLOG

AT_ONCE = 16
"""Connections that are taken in one turn of the event loop, before any is closed for another."""
TICKS_A_SECOND = 10
"""Of uvicorn's main loop."""
CLOSE = (b"connection", b"close")


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
            app,
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
