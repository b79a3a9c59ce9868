"""The application, straight on ASGI: paths, keys and models; and what /metrics counts."""

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

import vramfit
from vramfit.serve.pool import Figures, Pool
from vramfit.serve.requests import MODEL, Refused, Reply, dumps, problem
from vramfit.serve.settings import BODY_S, MAX_BODY_BYTES, MAX_COMING_BYTES
from vramfit.serve.shapes import MODELS, READERS, info, list_of_models, model_entry, shaped
from vramfit.serve.waiting import Full, Mailbox, PendingRequest
from vramfit.units import shown

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
LOOK, SEND = ("GET", "HEAD"), ("POST",)
ROUTES = {
    "/ping": LOOK,
    "/health": LOOK,
    "/metrics": ("GET",),
    "/info": LOOK,
    MODELS: LOOK,
    **dict.fromkeys(READERS, SEND),
}
OPEN = ("/ping", "/health")
"""Answered without a key."""
BY_PATH = "/models/"
"""Before the name of a model, and one of `READERS` after it."""
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
        self.replies = Counter("vramfit_requests", "Answers to POST by status.", ["status"], registry=registry)
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
        """A count so far: accepted or answered."""
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
    """Answers with the workers of pools.

    Args:
        pools: name of a model → its workers, started before the first request.
        metrics: told of every request.
        timeout_s: until an answer.
        api_key: what requests have to show; None answers everybody.
    """

    def __init__(
        self, pools: Mapping[str, Pool], metrics: Metrics, timeout_s: float, api_key: str | None = None
    ) -> None:
        self._pools, self._metrics, self._timeout_s = pools, metrics, timeout_s
        self._key = None if api_key is None else api_key.encode()
        self._since = int(time.time())
        self._mailbox: Mailbox[Reply] = Mailbox()
        self._num_coming_bytes = 0
        """Of requests that have not come whole."""

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        name, path = self._split(scope["path"])
        try:
            self._check(scope, path)
            if name is not None:
                self._pool_of(name)
            if path in READERS:
                reply = await self._invoke(scope, receive, name)
                self._metrics.replies.labels(reply.status).inc()
            elif path == "/metrics":
                await _send(send, Reply(200, self._figures()), "text/plain; version=0.0.4; charset=utf-8")
                return
            else:
                reply = self._look(path, name)
        except Refused as refusal:
            reply = refusal.reply
        await _send(send, shaped(path, reply))

    def _split(self, path: str) -> tuple[str | None, str]:
        """The model that a path names, and what is left of it."""
        if path.startswith(BY_PATH):
            for name in self._pools:
                if path.startswith(f"{BY_PATH}{name}/"):
                    rest = path.removeprefix(f"{BY_PATH}{name}")
                    return self._split(rest) if rest.startswith(MODELS) else (name, rest)
            for end in ROUTES:  # of a model that there is not
                if path.endswith(end):
                    return path.removeprefix(BY_PATH).removesuffix(end), end
        if path.startswith(f"{MODELS}/"):
            return path.removeprefix(f"{MODELS}/"), MODELS
        return None, path

    def _check(self, scope: dict[str, Any], path: str) -> None:
        """Raises Refused for a path or a method that there is not, or without the key."""
        if self._key is not None and path not in OPEN:
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if not hmac.compare_digest(given.strip(), self._key) or scheme.lower() != b"bearer":
                raise Refused(401, "the API key is missing or wrong", "send it: Authorization: Bearer KEY")
        method = scope["method"]
        if path not in ROUTES:
            raise Refused(404, f"there is no {path[:80]}", f"there are {', '.join(ROUTES)}")
        if method not in ROUTES[path]:
            raise Refused(405, f"{path} takes {' or '.join(ROUTES[path])}, not {method[:20]}")

    def _look(self, path: str, name: str | None) -> Reply:
        """What is asked for without a body: whether there are answers, or what there is."""
        if path in OPEN:
            is_ready = all(pool.is_ready for pool in self._pools.values())
            return Reply(200, b"{}") if is_ready else problem(503, "no worker is ready")
        if path == MODELS:
            if name is None:
                return Reply(200, dumps(list_of_models(self._pools, self._since)))
            return Reply(200, dumps(model_entry(name, self._since)))
        return Reply(200, dumps(self._info(name)))

    def _info(self, name: str | None) -> dict[str, Any]:
        name = next(iter(self._pools)) if name is None else name
        pool = self._pools[name]
        settings, ready = pool.settings, pool.started[0]
        limits = {
            "max_concurrent_requests": settings.max_waiting,
            "max_batch_tokens": ready.max_tokens,
            "tokenization_workers": settings.num_workers,
        }
        said = info(name, ready.known, limits) | {"version": vramfit.__version__}
        return said if len(self._pools) == 1 else said | {"models": list(self._pools)}

    def _figures(self) -> bytes:
        pools = self._pools.values()
        return self._metrics.text([one for pool in pools for one in pool.figures], sum(len(p.waiting) for p in pools))

    async def _invoke(self, scope: dict[str, Any], receive: Receive, name: str | None = None) -> Reply:
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._read(scope, receive)
            pool = self._choose(name, body)
        except TimeoutError:
            return problem(408, f"the request did not come whole within {BODY_S:.0f} s")
        except Refused as refusal:
            return refusal.reply
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        request = PendingRequest(
            body,
            deliver=lambda reply: self._mailbox.put(future, reply),
            is_wanted=lambda: not future.done(),
            path=self._split(scope["path"])[1],
        )
        try:
            pool.waiting.put(request)
        except Full:
            return problem(429, f"{len(pool.waiting):,} requests wait already", "come again later")
        began = time.monotonic()
        self._metrics.accepted.inc()
        reply = await self._wait(future, receive)
        self._metrics.answered.inc()
        self._metrics.times.observe(time.monotonic() - began)
        return reply

    def _choose(self, name: str | None, body: bytes) -> Pool:
        """The workers of the model that a request names; with one model there is no choice."""
        if name is None and len(self._pools) > 1:
            name = model_in(body)
            if name is None:
                hint = f'name one: "model": "{next(iter(self._pools))}", or {BY_PATH}{next(iter(self._pools))}/…'
                raise Refused(400, f"{len(self._pools)} models are served, and the request names none", hint)
        return next(iter(self._pools.values())) if name is None else self._pool_of(name)

    def _pool_of(self, name: str) -> Pool:
        if name not in self._pools:
            raise Refused(404, f"no model is called {shown(name)}", f"there are {', '.join(self._pools)}")
        return self._pools[name]

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


def model_in(body: bytes) -> str | None:
    """The model that a body names; None where there is none.

    >>> model_in(b'{"inputs": "a", "model": "small"}')
    'small'
    """
    try:
        name = json.loads(body)[MODEL]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) else None


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
