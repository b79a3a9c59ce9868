"""The application: three paths, straight on ASGI: /ping, /invocations and /metrics; and what /metrics counts."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from vramfit.serve.pool import Figures, Pool
from vramfit.serve.requests import Full, Mailbox, PendingRequest, Refused, Reply, problem
from vramfit.serve.settings import BODY_S, MAX_BODY_BYTES, MAX_COMING_BYTES

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
ROUTES = {"/ping": ("GET", "HEAD"), "/invocations": ("POST",), "/metrics": ("GET",)}
GONE = 499
"""Nobody reads the answer any more."""
SOON_S = 0.05
"""Most answers come within it: only then is it worth watching whether the client is still there."""
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """What has happened so far; any thread may count."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self.replies = Counter("vramfit_requests", "Answers of /invocations by status.", ["status"], registry=registry)
        self.accepted = Counter("vramfit_accepted", "Requests that joined the line.", registry=registry)
        self.answered = Counter("vramfit_answered", "Requests that left it with an answer.", registry=registry)
        self.restarts = Counter("vramfit_worker_restarts", "Workers that were replaced.", registry=registry)
        self.times = Histogram(
            "vramfit_answer_seconds",
            "From the last byte of a request to its answer.",
            buckets=BUCKETS_S,
            registry=registry,
        )

    def total(self, name: str) -> int:
        """A count so far: accepted, answered or worker_restarts."""
        return int(self._registry.get_sample_value(f"vramfit_{name}_total") or 0)

    def text(self, figures: Sequence[Figures | None], num_waiting: int) -> bytes:
        """Everything, with what each worker said last and how many requests wait now."""
        now = CollectorRegistry()
        waiting = Gauge("vramfit_waiting", "Requests in line.", registry=now)
        waiting.set(num_waiting)
        batches, tokens, recoveries = (
            Counter(f"vramfit_{name}", what, ["worker"], registry=now)
            for name, what in (
                ("batches", "Batches that went through the model."),
                ("tokens", "Tokens in them, without padding."),
                ("recoveries", "Times memory ran out and a batch was split."),
            )
        )
        limit = Gauge("vramfit_batch_tokens_limit", "Tokens that a batch may have now.", ["worker"], registry=now)
        memory = Gauge(
            "vramfit_worker_memory_bytes",
            "Reserved peak of the GPU, or what the process holds.",
            ["worker"],
            registry=now,
        )
        for number, said in enumerate(figures):
            if said is not None:
                batches.labels(number).inc(said.num_batches)
                tokens.labels(number).inc(said.num_tokens)
                recoveries.labels(number).inc(said.num_recoveries)
                limit.labels(number).set(said.max_tokens)
                memory.labels(number).set(said.memory_bytes)
        return generate_latest(self._registry) + generate_latest(now)


class App:
    """Answers with the workers of a pool.

    Args:
        pool: started before the first request.
        metrics: told of every request.
        timeout_s: until an answer.
    """

    def __init__(self, pool: Pool, metrics: Metrics, timeout_s: float) -> None:
        self._pool, self._metrics, self._timeout_s = pool, metrics, timeout_s
        self._mailbox: Mailbox[Reply] = Mailbox()
        self._num_coming_bytes = 0
        """Of requests that have not come whole."""

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path not in ROUTES:
            await _send(send, problem(404, f"there is no {path[:80]}", f"there are {', '.join(ROUTES)}"))
        elif method not in ROUTES[path]:
            await _send(send, problem(405, f"{path} takes {' or '.join(ROUTES[path])}, not {method[:20]}"))
        elif path == "/invocations":
            reply = await self._invoke(scope, receive)
            self._metrics.replies.labels(reply.status).inc()
            await _send(send, reply)
        elif path == "/ping":
            await _send(send, Reply(200, b"{}") if self._pool.is_ready else problem(503, "no worker is ready"))
        else:
            text = self._metrics.text(self._pool.figures, len(self._pool.waiting))
            await _send(send, Reply(200, text), "text/plain; version=0.0.4; charset=utf-8")

    async def _invoke(self, scope: dict[str, Any], receive: Receive) -> Reply:
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._read(scope, receive)
        except TimeoutError:
            return problem(408, f"the request did not come whole within {BODY_S:.0f} s")
        except Refused as refusal:
            return refusal.reply
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        request = PendingRequest.of(
            body,
            deliver=lambda reply: self._mailbox.put(future, reply),
            is_wanted=lambda: not future.done(),
        )
        try:
            self._pool.waiting.put(request)
        except Full:
            return problem(429, f"{len(self._pool.waiting):,} requests wait already", "come again later")
        began = time.monotonic()
        self._metrics.accepted.inc()
        reply = await self._wait(future, receive)
        self._metrics.answered.inc()
        self._metrics.times.observe(time.monotonic() - began)
        return reply

    async def _read(self, scope: dict[str, Any], receive: Receive) -> bytes:
        """The whole body.

        Raises:
            Refused: not JSON by its header, too large, too much with all others that come in, or the client went away.
        """
        _check_headers(scope)
        parts: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(GONE, "the client has gone")
                part = message.get("body", b"")
                size += len(part)
                self._num_coming_bytes += len(part)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                if self._num_coming_bytes > MAX_COMING_BYTES:
                    text = f"requests of {MAX_COMING_BYTES:,} bytes in all are being sent already"
                    raise Refused(429, text, "come again later")
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
        finally:
            self._num_coming_bytes -= size

    async def _wait(self, future: "asyncio.Future[Reply]", receive: Receive) -> Reply:
        """The answer to a request in line; or why nobody waits for it any more."""
        soon_s = min(SOON_S, self._timeout_s)
        if (await asyncio.wait({future}, timeout=soon_s))[0]:
            return future.result()
        leaving: asyncio.Future[None] = asyncio.ensure_future(_gone(receive))
        either: set[asyncio.Future[Any]] = {future, leaving}
        try:
            left_s = self._timeout_s - soon_s
            done, _ = await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if future in done:
            return future.result()
        future.cancel()
        if leaving in done:
            return problem(GONE, "the client has gone")
        return problem(503, f"no answer within {self._timeout_s:g} s", "come again later, with less at once")


def _check_headers(scope: dict[str, Any]) -> None:
    """Raises Refused for a request that is not JSON, or too large, by its headers."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        shown = kind.decode("latin-1")[:60] or "none"
        raise Refused(415, f"content type {shown} is not application/json", "send JSON, and say so: Content-Type")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large()


def _too_large() -> Refused:
    return Refused(413, f"a request may have {MAX_BODY_BYTES:,} bytes", "send it in several requests")


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, reply: Reply, media_type: str = "application/json") -> None:
    headers = {"Content-Type": media_type, "Content-Length": str(len(reply.body)), **reply.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": raw})
    await send({"type": "http.response.body", "body": reply.body})
