"""One connection, fed by hand, by a clock that the test moves."""

import asyncio
import logging
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from vramfit.listening import connections as module
from vramfit.listening.connections import Connections, protocol_class


class Transport(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.1", 5), "sockname": ("127.0.0.1", 80)})
        self.written = b""
        self.is_dropped = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_dropped

    def abort(self) -> None:
        self.is_dropped = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
WEBSOCKET = WHOLE[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
PARTS = (b"GET / HTTP/1.1\r\n", b"Host: a\r\n", *[b"X"] * 20)
BODY = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "parts", "lasts_s"),
    [
        (b"", PARTS, module.HEADERS_S),
        (WHOLE, PARTS, module.HEADERS_S),  # the second request of a connection
        (b"", (BODY, *[b"x"] * 50), module.BODY_S),  # which is answered without its body
        (b"", [WHOLE] * 60, None),
    ],
)
def test_a_byte_now_and_then_keeps_no_connection_open(
    monkeypatch: pytest.MonkeyPatch, first: bytes, parts: list[bytes], lasts_s: float | None
) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    all_open = Connections(10)

    async def go() -> None:
        config = uvicorn.Config(app, lifespan="off", log_level="warning", http=protocol_class(all_open))
        config.load()
        one = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg]
        transport = Transport()
        one.connection_made(transport)
        for part in [first, *parts] if first else parts:
            one.data_received(part)
            for _ in range(4):
                await asyncio.sleep(0)  # the application answers
            now[0] += 0.0 if part is first else 1.0
            all_open.drop_late()
            if transport.is_dropped:
                break
        assert transport.is_dropped == (lasts_s is not None)
        assert now[0] == (len(parts) if lasts_s is None else lasts_s + 1)
        one._unset_keepalive_if_required()  # type: ignore[attr-defined]

    asyncio.run(go())


def test_a_websocket_is_answered_as_plain_http_and_no_advice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("uvicorn.error")

    async def ask() -> bytes:
        config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, http=protocol_class(Connections(4)))
        config.load()
        state = ServerState()
        one = config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]
        transport = Transport()
        one.connection_made(transport)
        one.data_received(WEBSOCKET)
        await asyncio.gather(*state.tasks)
        one._unset_keepalive_if_required()  # type: ignore[attr-defined]
        return transport.written

    logger.addHandler(caplog.handler)
    try:
        assert asyncio.run(ask()).startswith(b"HTTP/1.1 200")
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
