"""The line of requests: bounded, in order, taken by weight."""

import asyncio
import threading
from typing import Any

import pytest
from tests.waiting import LIMIT_S

from vramfit.serve import waiting
from vramfit.serve.waiting import Full, Mailbox, PendingRequest, RequestQueue


def request(size: int = 4, wanted: bool = True) -> PendingRequest:
    return PendingRequest(b"x" * size, lambda reply: None, lambda: wanted)


def test_what_comes_first_is_taken_first_up_to_a_weight_in_tokens() -> None:
    line = RequestQueue(10)
    requests = [request(400), request(400), request(400)]
    for one in requests:
        line.put(one)
    assert line.take(250, 512) == requests[:2]
    assert line.take(1, 512) == requests[2:]  # one at least
    assert len(line) == 0


def test_a_long_text_weighs_no_more_than_it_can_be_read() -> None:
    line = RequestQueue(10)
    requests = [request(600_000), request(40)]
    for one in requests:
        line.put(one)
    assert line.take(4 * 64 + 11, 64) == requests


def test_the_next_one_is_turned_away_when_the_line_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    line = RequestQueue(2)
    line.put(request())
    line.put(request())
    with pytest.raises(Full):
        line.put(request())
    monkeypatch.setattr(waiting, "MAX_WAITING_BYTES", 100)
    heavy = RequestQueue(10)
    heavy.put(request(90))
    with pytest.raises(Full):
        heavy.put(request(20))


def test_nobody_works_for_those_who_have_gone() -> None:
    line = RequestQueue(10)
    wanted = request()
    for one in (request(wanted=False), wanted, request(wanted=False)):
        line.put(one)
    assert line.take(1000, 512) == [wanted]


def test_what_a_worker_died_of_is_tried_by_itself() -> None:
    line = RequestQueue(2)
    first, second, third = request(), request(), request()
    line.put(third)
    first.num_deaths = second.num_deaths = 1
    line.put_back([first, second])
    assert [line.take(1000, 512) for _ in range(3)] == [[first], [second], [third]]


def test_a_closed_line_gives_back_who_waits_and_lets_workers_go() -> None:
    line = RequestQueue(10)
    one = request()
    line.put(one)
    assert line.close() == [one]
    with pytest.raises(Full):
        line.put(request())
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(line.take(10, 10)))
    thread.start()
    thread.join(LIMIT_S)
    assert taken == [None]


NUM_THREADS, NUM_LETTERS = 4, 500


def test_every_future_gets_its_own_result_whichever_thread_puts_it() -> None:
    mailbox: Mailbox[int] = Mailbox()

    async def gather() -> list[int]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(NUM_THREADS * NUM_LETTERS)]

        def put(first: int) -> None:
            for number in range(first, len(futures), NUM_THREADS):
                mailbox.put(futures[number], number)

        for first in range(NUM_THREADS):
            threading.Thread(target=put, args=(first,)).start()
        return await asyncio.wait_for(asyncio.gather(*futures), LIMIT_S)

    assert asyncio.run(gather()) == list(range(NUM_THREADS * NUM_LETTERS))


def test_a_result_that_nobody_waits_for_any_more_troubles_nobody() -> None:
    mailbox: Mailbox[str] = Mailbox()

    async def leave() -> "asyncio.Future[str]":
        loop = asyncio.get_running_loop()
        gone, here = loop.create_future(), loop.create_future()
        gone.cancel()
        mailbox.put(gone, "late")
        mailbox.put(here, "in time")
        assert await here == "in time"
        return loop.create_future()

    mailbox.put(asyncio.run(leave()), "its loop has ended")
