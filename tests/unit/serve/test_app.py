"""The application over a line that the test empties itself: back-pressure, time limits, clients that go."""

import asyncio
import json
from typing import Any

from tests.waiting import LIMIT_S

from vramfit.serve import app as app_module
from vramfit.serve.app import App, Metrics
from vramfit.serve.pool import Figures
from vramfit.serve.requests import Reply, problem
from vramfit.serve.settings import MAX_BODY_BYTES
from vramfit.serve.waiting import PendingRequest, RequestQueue

JSON = ((b"content-type", b"application/json; charset=utf-8"),)
SCOPE = {"type": "http", "method": "POST", "path": "/invocations", "headers": list(JSON)}


class Pool:
    """The part of a pool that an application sees."""

    def __init__(self, max_waiting: int = 4, ready: bool = True) -> None:
        self.waiting = RequestQueue(max_waiting)
        self.is_ready = ready
        self.figures: list[Any] = []


def make(timeout_s: float = LIMIT_S, api_key: str | None = None, **keywords: Any) -> tuple[App, Any, Metrics]:
    pool: Any = Pool(**keywords)
    metrics = Metrics()
    return App({"small": pool}, metrics, timeout_s, api_key), pool, metrics


async def call(
    app: App, method: str, path: str, *parts: bytes, headers: Any = JSON, leaves: bool = False
) -> tuple[int, Any, dict[str, str]]:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    if leaves:
        messages.append({"type": "http.disconnect"})
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app({"type": "http", "method": method, "path": path, "headers": list(headers)}, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = sent[1]["body"]
    assert int(found["content-length"]) == len(body)
    is_json = found["content-type"] == "application/json"
    return sent[0]["status"], json.loads(body) if is_json else body.decode(), found


async def invoke(app: App, **keywords: Any) -> tuple[int, Any, dict[str, str]]:
    return await call(app, "POST", "/invocations", b'{"inputs"', b': "a"}', **keywords)


async def all_is_asked() -> None:
    """Whoever asks has come as far as it can: nothing but an answer is waited for."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_an_answer_goes_to_the_one_who_asked() -> None:
    app, pool, metrics = make()

    async def go() -> None:
        asking = [asyncio.ensure_future(invoke(app)) for _ in range(3)]
        await all_is_asked()
        assert len(pool.waiting) == 3
        for number, request in enumerate(pool.waiting.take(1000, 512)):
            assert request.body == b'{"inputs": "a"}'
            request.deliver(Reply(200, str(number).encode()))
        assert [(await one)[:2] for one in asking] == [(200, 0), (200, 1), (200, 2)]

    asyncio.run(go())
    assert (metrics.total("accepted"), metrics.total("answered")) == (3, 3)


def test_a_full_line_says_so_at_once() -> None:
    app, pool, metrics = make(max_waiting=1)

    async def go() -> None:
        first = asyncio.ensure_future(invoke(app))
        await all_is_asked()
        status, body, headers = await invoke(app)
        assert (status, body["error"]) == (429, "1 requests wait already")
        assert headers["retry-after"] == "1"
        (request,) = pool.waiting.take(1000, 512)
        request.deliver(Reply(200, b"0"))
        assert (await first)[:2] == (200, 0)

    asyncio.run(go())
    assert (metrics.total("accepted"), metrics.total("answered")) == (1, 1)


def test_no_answer_in_time_is_said_and_the_work_is_dropped() -> None:
    app, pool, _ = make(timeout_s=0.02)
    status, body, headers = asyncio.run(invoke(app))
    assert (status, body["error"]) == (503, "no answer within 0.02 s")
    assert headers["retry-after"] == "1"
    pool.waiting.put(PendingRequest(b"x", lambda reply: None, lambda: True))
    assert [request.body for request in pool.waiting.take(1000, 512)] == [b"x"]


def test_nobody_works_for_a_client_that_hung_up() -> None:
    app, pool, metrics = make()
    assert asyncio.run(invoke(app, leaves=True))[0] == 499
    (request,) = pool.waiting.close()
    assert not request.is_wanted()
    assert metrics.total("answered") == 1


def test_what_is_no_invocation_is_refused_in_words(monkeypatch: Any) -> None:
    app, _, metrics = make()
    run = asyncio.run
    assert run(call(app, "GET", "/elsewhere"))[0] == 404
    assert run(call(app, "GET", "/invocations"))[0] == 405
    status, body, _ = run(invoke(app, headers=[(b"content-type", b"text/plain")]))
    assert (status, body["error"]) == (415, "content type text/plain is not application/json")
    assert run(invoke(app, headers=[]))[0] == 415
    assert run(call(app, "POST", "/invocations", *[b"x" * 2**20] * (MAX_BODY_BYTES // 2**20 + 1)))[0] == 413
    assert run(invoke(app, headers=[*JSON, (b"content-length", b"99999999999")]))[0] == 413  # before it is sent
    monkeypatch.setattr(app_module, "BODY_S", 0.01)

    async def slowly() -> int:
        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        return (await app._invoke(SCOPE, receive)).status

    assert run(slowly()) == 408
    assert metrics.total("accepted") == 0


def test_requests_that_stay_unfinished_take_bounded_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(app_module, "MAX_COMING_BYTES", 1000)
    app, _, _ = make(timeout_s=0.01)

    async def go() -> None:
        stalled = [asyncio.ensure_future(app._invoke(SCOPE, stalling(400))) for _ in range(2)]
        await asyncio.sleep(0)
        status, body, headers = await call(app, "POST", "/invocations", b"x" * 400)
        assert (status, headers["retry-after"]) == (429, "1")
        assert "1,000 bytes in all" in body["error"]
        for one in stalled:
            one.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        assert (await invoke(app))[0] == 503  # taken again, and no worker is there

    def stalling(size: int) -> Any:
        parts = [{"type": "http.request", "body": b"x" * size, "more_body": True}]

        async def receive() -> dict[str, Any]:
            if not parts:
                await asyncio.Event().wait()
            return parts.pop()

        return receive

    asyncio.run(go())


def test_ping_says_whether_anybody_can_answer() -> None:
    assert asyncio.run(call(make()[0], "GET", "/ping"))[:2] == (200, {})
    assert asyncio.run(call(make(ready=False)[0], "GET", "/ping"))[0] == 503


def test_a_key_is_asked_for_everywhere_but_for_health() -> None:
    app, pool, metrics = make(api_key="secret")
    run = asyncio.run
    for header in (b"", b"secret", b"Bearer", b"Bearer wrong", b"Basic secret", b"Bearer secret2", b"Bearer \xff"):
        status, body, headers = run(invoke(app, headers=[*JSON, (b"authorization", header)]))
        assert (status, body["error"]) == (401, "the API key is missing or wrong")
        assert headers["www-authenticate"] == "Bearer"
    assert run(call(app, "GET", "/metrics"))[0] == 401
    assert run(call(app, "POST", "/v1/embeddings"))[1]["error"]["code"] == "invalid_api_key"
    assert (run(call(app, "GET", "/health"))[0], run(call(app, "HEAD", "/ping"))[0]) == (200, 200)
    assert (metrics.total("accepted"), len(pool.waiting)) == (0, 0)
    shown = [(b"authorization", b"bearer secret")]
    assert run(call(app, "GET", "/v1/models", headers=shown))[1]["data"][0]["id"] == "small"


def test_a_request_goes_to_the_model_that_it_names() -> None:
    pools: dict[str, Any] = {"small": Pool(), "org/large": Pool()}
    app = App(pools, Metrics(), 0.01)
    run = asyncio.run

    def bodies(name: str) -> list[tuple[str, bytes]]:
        return [(request.path, request.body) for request in pools[name].waiting.close()]

    run(call(app, "POST", "/embed", b'{"inputs": "a", "model": "org/large"}'))
    assert bodies("org/large") == [("/embed", b'{"inputs": "a", "model": "org/large"}')]
    run(call(app, "POST", "/models/small/v1/embeddings", b"{}"))
    assert bodies("small") == [("/v1/embeddings", b"{}")]
    for body in (b"{}", b"[1]", b"", b'{"model": 3}', b"[" * 100_000, b'"model"', b"\xff"):
        status, said, _ = run(call(app, "POST", "/rerank", body))
        assert status == 422
        assert "2 models are served, and the request names none" in said["error"]
    status, said, _ = run(call(app, "POST", "/v1/embeddings", b'{"model": "other"}'))
    assert (status, said["error"]["code"]) == (404, "not_found")
    assert run(call(app, "GET", "/v1/models/org/large"))[1]["id"] == "org/large"
    assert run(call(app, "GET", "/v1/models/other"))[0] == 404
    status, said, _ = run(call(app, "POST", "/models/org/other/v1/embeddings", b"{}"))
    assert (status, said["error"]["message"]) == (404, "no model is called 'org/other' (there are small, org/large)")
    assert run(call(app, "GET", "/models/other/health"))[0] == 404
    for before in ("", "/models/small", "/models/org/large"):  # as OpenAI's client asks, whatever its base_url
        assert len(run(call(app, "GET", f"{before}/v1/models"))[1]["data"]) == 2
        assert run(call(app, "GET", f"{before}/v1/models/org/large"))[1]["id"] == "org/large"
    pools["small"].is_ready = False
    status, said, _ = run(call(app, "GET", "/health"))
    assert (status, said["error_type"]) == (503, "Unhealthy")


def test_metrics_add_up() -> None:
    app, pool, metrics = make()
    said = Figures(num_batches=7, num_tokens=900, num_recoveries=1, max_tokens=512, memory_bytes=2**30 + 1)
    pool.figures = [None, said]
    for took_s in (0.001, 0.3, 100.0):
        metrics.accepted.inc()
        metrics.answered.inc()
        metrics.times.observe(took_s)
        metrics.replies.labels(200).inc()
    status, text, headers = asyncio.run(call(app, "GET", "/metrics"))
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    lines = dict(line.rpartition(" ")[::2] for line in text.splitlines() if not line.startswith("#"))
    assert lines['vramfit_requests_total{status="200"}'] == "3.0"
    assert lines['vramfit_batches_total{worker="1"}'] == "7.0"
    assert float(lines['vramfit_worker_memory_bytes{worker="1"}']) == 2**30 + 1
    assert 'vramfit_batches_total{worker="0"}' not in lines
    assert lines['vramfit_answer_seconds_bucket{le="0.5"}'] == "2.0"
    assert lines['vramfit_answer_seconds_bucket{le="+Inf"}'] == lines["vramfit_answer_seconds_count"] == "3.0"
    assert (
        text.count("# TYPE")
        == text.count("# HELP")
        == len({line.split()[2] for line in text.splitlines() if "TYPE" in line})
    )
    assert problem(503, "x").headers == {"Retry-After": "1"}
