"""`Guard`: what every request passes: no foreign hosts, no other sites, and headers that keep the page to itself."""

import json
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BATCH = 65_536
MAX_SEQ = 32_768
MAX_LABELS = 100_000
MAX_RANK = 1_024
MAX_PARAMETERS = 100
"""Of one request: more than three times as many as there are."""
MAX_NAME = 200
"""Characters of a model's or a GPU's name."""
QUICK_S = 20.0
"""Seconds of computing that an estimate may take."""
SLOW_S = 90.0
"""The same of a plan or of a largest batch."""
WALL_FACTOR = 4.0
"""So much longer may it take by the clock, on a machine that is busy with other things."""
MAX_WAITING = 512
"""Requests that wait for a worker; the next one is told to come again."""
MAX_REMEMBERED_BYTES = 48 * 2**20
"""Answers that are kept."""

BATCH_STOPS = (
    *range(1, 17),
    *(20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024),
)
"""Where the slider of the page halts; any other batch can be typed."""
SEQ_STOPS = (*range(32, 513, 32), 640, 768, 896, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ROW_OF_GPUS = ("rtx-3060", "t4", "rtx-4080", "a10g", "rtx-4090", "a100-40gb", "l40s", "h100-sxm")
"""GPUs that the page names the largest batch for."""


HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names under which this server is asked on its own machine; a name that only leads here is another."""
OURS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
"""The same in a request's Host, with a port or without."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Refuses what does not come from this machine's own pages, and adds headers to what goes out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = refusal_of(Headers(scope=scope)) or _too_many(scope["query_string"])
        if refusal is not None:
            await _refuse(send, *refusal)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        await self._app(scope, receive, send_with_headers)


def refusal_of(headers: Headers) -> tuple[int, str] | None:
    """Status and sentence for a request that is not answered; None for one that is.

    A page of another site can send requests here, and a name of its own may lead to 127.0.0.1 (DNS rebinding): the
    first are known by their origin, the second by the host they ask for.
    """
    host = headers.get("host", "")
    if not OURS.fullmatch(host):
        return 421, f"this server answers for {', '.join(HOSTS)} only, not for {host[:80]!r}"
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return 403, f"this server does not answer pages of another origin ({origin[:80]!r})"
    if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
        return 403, "this server does not answer pages of another site"
    return None


def _too_many(query: bytes) -> tuple[int, str] | None:
    """Status and sentence for a query of more parameters than anybody has use for: each would be looked at."""
    number = query.count(b"&") + 1
    return (400, f"{number:,} parameters: there may be {MAX_PARAMETERS}") if number > MAX_PARAMETERS else None


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"error": sentence, "hint": "open the address that vramfit web printed", "problems": []}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
