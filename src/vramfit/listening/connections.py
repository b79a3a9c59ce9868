"""`Connections`: all that are open, what each is waiting for, and which one is closed first when there are too many.

Each connection takes a file handle of the server, so their number is bounded below the process's limit. Where the bound
is reached, a new connection replaces another: of the connections from one address that have not sent a whole request,
the one that has waited longest. A usual client sends its request with the connection and is not affected.
`protocol_class` is uvicorn's HTTP protocol with these rules; `CloseUnread` ends the connection of a request that was
answered before its body had come.
"""

import asyncio
import os
import sys
from contextlib import suppress
from enum import Enum
from importlib.util import find_spec
from time import monotonic
from typing import Any, Protocol

MAX_CONNECTIONS = 4096
"""However many file handles there are: each connection also takes memory."""
MIN_CONNECTIONS = 16
SPARE_HANDLES = 128
"""For worker processes, files, and connections that are taken before others are closed."""
HEADERS_S = 10.0
"""Until the headers of a request have come whole."""
BODY_S = 30.0
"""Until its body has, too."""
UNREAD_S = 30.0
"""A client that takes nothing of its answer for so long is gone."""


class Awaits(Enum):
    """What a connection waits for."""

    HEADERS = "headers"
    BODY = "body"
    ANSWER = "answer"
    NEXT = "next"
    """Answered, and kept open for the next request."""


UNFINISHED = (Awaits.HEADERS, Awaits.BODY)
"""Requests that have not come whole."""
MANY = 4
"""Unfinished requests are many where one address has more than this part of all connections."""
LIMITS_S = {Awaits.HEADERS: HEADERS_S, Awaits.BODY: BODY_S}


class Connection(Protocol):
    """What is asked of a connection here."""

    address: str
    """Where it comes from."""

    @property
    def unsent_bytes(self) -> int:
        """Of answers that the client has not taken yet."""

    def drop(self) -> None:
        """Close it at once."""


Line = dict[Connection, float]
"""Connections with the time since which they wait, the oldest first."""


class Connections:
    """Connections by what they wait for and where they come from, in the order they began to wait.

    Args:
        most: that may be open at once.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.most_unfinished = max(3 * most // 4, 1)
        """Of one address, without a whole request; what waits for an answer, or for its next request, is not counted:
        behind a load balancer, all clients have one address."""
        self._lines: dict[Awaits, dict[str, Line]] = {awaits: {} for awaits in Awaits}
        self._places: dict[Connection, Awaits] = {}
        self._unsent: dict[Connection, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def admit(self, new: Connection) -> bool:
        """Take a new connection, and drop another where there are too many; False where none may be dropped for it."""
        if sum(map(len, self._unfinished(new.address))) >= self.most_unfinished:
            self._drop_first(max(self._unfinished(new.address), key=len))
        if len(self) >= self.most and not self._drop_first(self._replaceable()):
            return False
        self._add(new, Awaits.HEADERS)
        return True

    def move(self, one: Connection, awaits: Awaits) -> None:
        """Note what a connection waits for from now on."""
        if one in self._places:
            self.remove(one)
            self._add(one, awaits)

    def remove(self, one: Connection) -> None:
        """Forget a connection that is closed."""
        awaits = self._places.pop(one, None)
        self._unsent.pop(one, None)
        if awaits is None:
            return
        by_address = self._lines[awaits]
        del by_address[one.address][one]
        if not by_address[one.address]:
            del by_address[one.address]

    def drop_late(self) -> None:
        """Drop those that have taken too long with a request, or with taking its answer."""
        now = monotonic()
        for awaits, limit_s in LIMITS_S.items():
            late = [o for line in self._lines[awaits].values() for o, since in line.items() if now - since > limit_s]
            for one in late:
                self._drop(one)
        for one in list(self._places):
            if self._takes_nothing(one, now):
                self._drop(one)

    def _add(self, one: Connection, awaits: Awaits) -> None:
        self._places[one] = awaits
        self._lines[awaits].setdefault(one.address, {})[one] = monotonic()

    def _unfinished(self, address: str) -> list[Line]:
        return [self._lines[awaits].get(address, {}) for awaits in UNFINISHED]

    def _replaceable(self) -> Line:
        """Which connections make room, oldest first: unfinished ones where they are many, else idle ones.

        One that waits for its answer is never dropped for another.
        """
        unfinished = max((line for a in UNFINISHED for line in self._lines[a].values()), key=len, default={})
        idle = max(self._lines[Awaits.NEXT].values(), key=len, default={})
        return unfinished if len(unfinished) > self.most // MANY or not idle else idle

    def _drop_first(self, line: Line) -> bool:
        for one in line:
            self._drop(one)
            return True
        return False

    def _drop(self, one: Connection) -> None:
        self.remove(one)
        one.drop()

    def _takes_nothing(self, one: Connection, now: float) -> bool:
        size = one.unsent_bytes
        if not size:
            self._unsent.pop(one, None)
            return False
        before, since = self._unsent.get(one, (0, now))
        if size != before:
            self._unsent[one] = (size, now)
            return False
        return now - since > UNREAD_S


def most_connections() -> int:
    """As many as the limit of file handles leaves room for."""
    if sys.platform == "win32":
        return 400  # of the 512 that select takes there
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(max(limit - _num_open() - SPARE_HANDLES, MIN_CONNECTIONS), MAX_CONNECTIONS)


def _num_open() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 64


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
