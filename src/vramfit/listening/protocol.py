"""`protocol_class`: uvicorn's HTTP protocol, whose connections are counted, bounded and closed without a reset.

`CloseUnread` goes around the application: a request that is answered before its body has come ends its connection.
"""

import asyncio
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from vramfit.listening.connections import Awaits, Connections

LINGER_S = 1.0
"""After the end of what is sent: for the client to close as well."""
DRAIN_S = 1.0
DRAIN_BYTES = 2**20
"""Of a body that nobody wants: so much is read and dropped, that the client may see its answer before it is cut off."""
CLOSE = (b"connection", b"close")
FULL_BODY = b'{"error":"too many connections are open","hint":"come again later"}'
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(FULL_BODY), FULL_BODY)
)

BAD_BODY = b"Invalid HTTP request received."
BAD = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BAD_BODY), BAD_BODY)
)


class CloseUnread:
    """An application whose answers end the connection where the request's body has not come whole."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = getattr(receive, "__self__", None)  # uvicorn's record of the request
        is_unread = False

        async def send_and_close(message: dict[str, Any]) -> None:
            nonlocal is_unread
            if message["type"] == "http.response.start":
                is_unread = getattr(request, "more_body", False)
                if is_unread:
                    message = {**message, "headers": [*message.get("headers", ()), CLOSE]}
            elif is_unread and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _drain(receive)
                message = {"type": "http.response.body", "body": b""}  # now uvicorn closes
            await send(message)

        await self._app(scope, receive, send_and_close)


async def _drain(receive: Any) -> None:
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while num_bytes < DRAIN_BYTES:
                message = await receive()
                if not message.get("more_body", False):
                    return
                num_bytes += len(message["body"])


def protocol_class(connections: Connections) -> Any:
    """A class of protocols that register with `connections`; it parses with httptools where that is installed."""
    if find_spec("httptools") is not None:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Usual
    else:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Usual  # type: ignore[assignment]
    return type("Protocol", (_Registered, Usual), {"connections_here": connections})


class _Registered(asyncio.Protocol):
    """Goes before a protocol of uvicorn's."""

    connections_here: Connections
    address = ""
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    client: tuple[str, int] | None
    cycle: Any
    """The last request: uvicorn's record of how much of it has come and been answered."""
    _noted: Any = None
    _is_ending = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self.connections_here.admit(self):
            transport.write(FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections_here.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        before = self.cycle
        was_answered = before is not None and self._awaits() is Awaits.NEXT
        super().data_received(data)
        has_begun = was_answered and self.cycle is before
        self._note(Awaits.HEADERS if has_begun else self._awaits())

    def on_response_complete(self) -> None:
        """Called by uvicorn."""
        super().on_response_complete()  # type: ignore[misc]
        self._note(self._awaits())

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are no HTTP; one answer is given to a request, and no second one."""
        cycle = self.cycle
        is_answered = cycle is not None and cycle.response_started and (cycle.more_body or not cycle.response_complete)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # what the application still sends is dropped
            cycle.message_event.set()
        if not is_answered:
            self.transport.write(BAD)
        self._end()

    def _unsupported_upgrade_warning(self) -> None:
        """Called by uvicorn for a WebSocket, which is answered as plain HTTP. Its advice to install a library
        would help nobody."""

    def shutdown(self) -> None:
        """Called by uvicorn when it stops: finish what is asked, or end an idle connection.

        What a client sends to a socket that is closed is answered by a reset: so the client is told the end and closes
        first.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            super().shutdown()  # type: ignore[misc]
        else:
            self._end()

    def _end(self) -> None:
        if not self._is_ending and not self.transport.is_closing():
            self._is_ending = True
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.drop)

    @property
    def unsent_bytes(self) -> int:
        """Of answers that the client has not taken yet."""
        return self.transport.get_write_buffer_size()

    def drop(self) -> None:
        """Close at once."""
        self.transport.abort()

    def _awaits(self) -> Awaits:
        if self.cycle is None:
            return Awaits.HEADERS
        if self.cycle.more_body:
            return Awaits.BODY
        return Awaits.NEXT if self.cycle.response_complete else Awaits.ANSWER

    def _note(self, awaits: Awaits) -> None:
        """Only a change of state restarts the clock: single bytes do not."""
        if (self.cycle, awaits) != self._noted:
            self._noted = (self.cycle, awaits)
            self.connections_here.move(self, awaits)
