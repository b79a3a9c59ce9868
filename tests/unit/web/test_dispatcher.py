"""Queries are queued, asked once, remembered; a worker that takes too long is ended and another is there."""

import asyncio
from typing import Any

import pytest
from tests.waiting import LIMIT_S

from vramfit.web import dispatcher as dispatcher_module
from vramfit.web import workers as workers_module
from vramfit.web.dispatcher import AnswerCache, Busy, Dispatcher, Gone, neighbours
from vramfit.web.queries import EstimateQuery, PlanQuery
from vramfit.web.workers import Worker, worker_context


class SlowWorker:
    """Answers when it is let go, and counts."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.asked: list[Any] = []

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def ask(self, query: Any) -> tuple[int, bytes]:
        self.asked.append(query)
        return 200, b"{}"


async def stays() -> bool:
    return False


async def leaves() -> bool:
    return True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "Worker", SlowWorker)


def workers_of(dispatcher: Dispatcher) -> list[SlowWorker]:
    return [line.worker for line in (*dispatcher._quick, *dispatcher._slow)]  # type: ignore[misc]


@pytest.mark.usefixtures("slow")
def test_equal_queries_are_asked_once_and_remembered() -> None:
    async def scenario() -> list[Any]:
        dispatcher = Dispatcher(num_workers=2)
        await dispatcher.start()
        query = PlanQuery(model="bert-tiny")
        await asyncio.gather(*(dispatcher.ask(query, stays) for _ in range(50)))
        await dispatcher.ask(query, stays)
        await dispatcher.stop()
        return [q for worker in workers_of(dispatcher) for q in worker.asked]

    assert len(asyncio.run(scenario())) == 1


@pytest.mark.usefixtures("slow")
def test_beyond_the_queue_comes_a_refusal() -> None:
    async def scenario() -> int:
        dispatcher = Dispatcher(num_workers=1, max_waiting=3)  # not started: nothing leaves the queue
        waiting = [asyncio.create_task(dispatcher.ask(EstimateQuery(batch=n), stays)) for n in range(1, 4)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await dispatcher.ask(EstimateQuery(batch=99), stays)
        for task in waiting:
            task.cancel()
        return len(waiting)

    assert asyncio.run(scenario()) == 3


@pytest.mark.usefixtures("slow")
def test_what_nobody_waits_for_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "LOOKED_AFTER_S", 0.01)

    async def scenario() -> list[Any]:
        dispatcher = Dispatcher(num_workers=1)
        with pytest.raises(Gone):
            await dispatcher.ask(PlanQuery(model="bert-tiny"), leaves)
        await dispatcher.start()
        await dispatcher.ask(PlanQuery(model="bert-mini"), stays)
        await dispatcher.stop()
        return [q.model for worker in workers_of(dispatcher) for q in worker.asked]

    assert asyncio.run(scenario()) == ["bert-mini"]


@pytest.mark.usefixtures("slow")
def test_places_beside_the_sliders_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "QUIET_S", 0.0)

    async def scenario() -> set[Any]:
        dispatcher = Dispatcher(num_workers=2)
        await dispatcher.start()
        query = EstimateQuery(batch=16, seq=128)
        await dispatcher.ask(query, stays)
        wanted = {query, *neighbours(query)}
        asked: set[Any] = set()
        while asked != wanted:
            await asyncio.sleep(0.001)
            asked = {q for worker in workers_of(dispatcher) for q in worker.asked}
        await dispatcher.stop()
        return asked

    asked = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert {(q.batch, q.seq) for q in asked} >= {(15, 128), (20, 128), (16, 96), (16, 512)}


def test_a_prediction_that_takes_too_long_is_ended_and_the_next_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "WALL_FACTOR", 1000.0)  # however busy this machine is
    worker = Worker(worker_context(), limit_s=0.5, niceness=0, allow_local=False)
    worker.start()
    try:
        status, body = worker.ask(PlanQuery(model="bert-large-uncased", batch=64, seq=512))
        assert status == 422
        assert b"no answer within" in body
        status, body = worker.ask(EstimateQuery(model="no-such-model"))
        assert status == 422
        assert b"unknown model" in body
    finally:
        worker.stop()


def test_a_machine_that_is_too_busy_is_no_fault_of_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "WALL_FACTOR", 0.0)
    worker = Worker(worker_context(), limit_s=20, niceness=0, allow_local=False)
    worker.start()
    try:
        status, body = worker.ask(PlanQuery(model="bert-large-uncased", batch=64, seq=512))
        assert status == 503
        assert b"too busy" in body
    finally:
        worker.stop()


def test_the_memory_of_answers_is_bounded() -> None:
    kept = AnswerCache(max_bytes=1000)
    for n in range(100):
        kept.put(n, (200, b"x" * 90))
    assert kept.num_bytes <= 1000
    assert kept.get(99) is not None
    assert kept.get(0) is None
