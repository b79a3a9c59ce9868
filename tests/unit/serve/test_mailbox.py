"""Results from other threads: each future gets its own, whoever puts it and however many come at once."""

import asyncio
import threading

from tests.waiting import LIMIT_S

from vramfit.serve.mailbox import Mailbox

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
