"""`Guard`: what every request passes: no foreign hosts, no other sites, and headers that keep the page to itself."""

import json
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
        refusal = refusal_of(Headers(scope=scope))
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


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"error": sentence, "hint": "open the address that vramfit web printed", "problems": []}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
