"""`Dispatcher`: queries queued for the workers, equal ones asked once, answers remembered, likely ones prepared."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest

from vramfit.models.catalogue import find_entry
from vramfit.web.queries import (
    BATCH_STOPS,
    MAX_REMEMBERED_BYTES,
    MAX_WAITING,
    QUICK_S,
    SEQ_STOPS,
    SLOW_S,
    EstimateQuery,
    Query,
)
from vramfit.web.workers import Reply, Worker, worker_context

QUIET_S = 0.04
"""A worker that has been idle for so long prepares what is likely to be asked next."""
LOOKED_AFTER_S = 0.5
"""How often it is looked whether the reader of an answer is still there."""
MAX_LONGER = 4
"""A query goes to the worker that has its trace, unless so many more wait there than elsewhere."""
MAX_HOMES = 256
"""Traces whose workers are remembered."""
SLOW_NICENESS = 3

IsGone = Callable[[], Awaitable[bool]]
NUM_BATCHES = 8
NUM_SEQS = 15


class Busy(Exception):
    """Too many queries are waiting."""


class Gone(Exception):
    """The client has disconnected."""


@dataclass(eq=False, slots=True)
class PendingQuery:
    """A query on its way."""

    query: Query
    reply: "asyncio.Future[Reply]"
    num_readers: int = 0
    is_ahead: bool = False
    """Prepared in advance: no client has asked for it yet."""


@dataclass(eq=False, slots=True)
class WorkerQueue:
    """What waits for one worker."""

    worker: Worker
    pending: "deque[PendingQuery]" = field(default_factory=deque)
    ahead: "deque[EstimateQuery]" = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    is_busy: bool = False

    @property
    def length(self) -> int:
        return len(self.pending) + self.is_busy


class Dispatcher:
    """Takes queries and gives answers.

    Estimates have workers of their own, which keep traces; plans and largest batches go to one that leaves the
    processor to the others.

    Args:
        num_workers: processes for estimates.
        max_waiting: queries that may wait; the next one is refused with `Busy`.
    """

    def __init__(self, *, num_workers: int = 2, allow_local: bool = False, max_waiting: int = MAX_WAITING) -> None:
        context = worker_context()
        quick = [Worker(context, limit_s=QUICK_S, niceness=0, allow_local=allow_local) for _ in range(num_workers)]
        slow = Worker(context, limit_s=SLOW_S, niceness=SLOW_NICENESS, allow_local=allow_local)
        self._quick = [WorkerQueue(worker) for worker in quick]
        self._slow = [WorkerQueue(slow)]
        self._max_waiting = max_waiting
        self._pending: dict[Query, PendingQuery] = {}
        self._remembered = AnswerCache(MAX_REMEMBERED_BYTES)
        self._threads = ThreadPoolExecutor(num_workers + 1, thread_name_prefix="vramfit-web")
        self._tasks: list[asyncio.Task[None]] = []
        self._homes: OrderedDict[Query, list[WorkerQueue]] = OrderedDict()
        self._asked_at = 0.0
        self._asked_before: EstimateQuery | None = None

    async def start(self) -> None:
        """Have all workers ready."""
        queues = [*self._quick, *self._slow]
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, queue.worker.start) for queue in queues))
        self._tasks = [asyncio.create_task(self._serve(queue)) for queue in queues]

    async def stop(self) -> None:
        """End all workers."""
        for task in self._tasks:
            task.cancel()
        for queue in (*self._quick, *self._slow):
            queue.worker.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ask(self, query: Query, is_gone: IsGone) -> Reply:
        """The answer to a query.

        Args:
            is_gone: whether the reader has left.

        Raises:
            Busy: too many are waiting.
            Gone: the reader has left.
        """
        known = self._remembered.get(query)
        self._asked_at = asyncio.get_running_loop().time()
        if known is None:
            pending = self._pending.get(query) or self._enter(query)
            pending.is_ahead = False
            pending.num_readers += 1
            try:
                known = await self._wait(pending, is_gone)
            finally:
                pending.num_readers -= 1
        if isinstance(query, EstimateQuery) and known[0] == 200:
            self._prepare(query)
        return known

    async def _wait(self, pending: PendingQuery, is_gone: IsGone) -> Reply:
        while True:
            done, _ = await asyncio.wait({pending.reply}, timeout=LOOKED_AFTER_S)
            if done:
                return pending.reply.result()
            if await is_gone():
                raise Gone

    def _enter(self, query: Query) -> PendingQuery:
        queues = self._quick if isinstance(query, EstimateQuery) else self._slow
        if sum(len(queue.pending) for queue in queues) >= self._max_waiting:
            raise Busy
        queue = self._queue_of(query, queues)
        pending = PendingQuery(query, asyncio.get_running_loop().create_future())
        self._pending[query] = pending
        queue.pending.append(pending)
        queue.arrived.set()
        return pending

    def _queue_of(self, query: Query, queues: list[WorkerQueue]) -> WorkerQueue:
        """The worker that has traced such a job before, where that one is not much busier than another."""
        shortest = min(queues, key=lambda queue: queue.length)
        if not isinstance(query, EstimateQuery):
            return shortest
        homes = self._homes.get(_trace_of(query)) or [shortest]
        home = min(homes, key=lambda queue: queue.length)
        queue = shortest if home.length - shortest.length >= MAX_LONGER else home
        self._settle(query, queue)
        return queue

    def _settle(self, query: EstimateQuery, queue: WorkerQueue) -> None:
        """Remember which worker has a trace."""
        homes = self._homes.setdefault(_trace_of(query), [])
        self._homes.move_to_end(_trace_of(query))
        if queue not in homes:
            homes.append(queue)
        while len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    def _prepare(self, query: EstimateQuery) -> None:
        """Let workers that have nothing else to do answer what is likely to be asked next.

        New traces take longest: they are made by others than the one that the reader is asking just now. Other batches
        are shared out, so that two workers have their trace, and one is free when the reader moves on.
        """
        before, self._asked_before = self._asked_before, query
        here = self._homes.get(_trace_of(query), self._quick)[0]
        elsewhere = [queue for queue in self._quick if queue is not here] or self._quick
        for queue in self._quick:
            queue.ahead.clear()
        for number, other in enumerate(neighbours(query, before)):
            if other in self._remembered or other in self._pending:
                continue
            homes = self._homes.get(_trace_of(other)) or elsewhere
            if other.seq == query.seq:
                homes = [here, *elsewhere]
            queue = homes[0] if number == 0 else min(homes, key=lambda queue: len(queue.ahead))
            queue.ahead.append(other)
            queue.arrived.set()

    async def _serve(self, queue: WorkerQueue) -> None:
        loop = asyncio.get_running_loop()
        while True:
            pending = await self._next(queue)
            if pending.num_readers == 0 and not pending.is_ahead:
                self._pending.pop(pending.query, None)
                pending.reply.cancel()
                continue
            queue.is_busy = True
            try:
                reply = await loop.run_in_executor(self._threads, queue.worker.ask, pending.query)
            finally:
                queue.is_busy = False
                self._pending.pop(pending.query, None)
            if reply[0] in (200, 422):
                self._remembered.put(pending.query, reply)
            if isinstance(pending.query, EstimateQuery):
                self._settle(pending.query, queue)
            if not pending.reply.cancelled():
                pending.reply.set_result(reply)

    async def _next(self, queue: WorkerQueue) -> PendingQuery:
        """The next query that waits, or, where all is quiet, one to prepare."""
        while not queue.pending:
            queue.arrived.clear()
            quiet_s = asyncio.get_running_loop().time() - self._asked_at
            if queue.ahead and quiet_s >= QUIET_S:
                query = queue.ahead.popleft()
                if query not in self._remembered and query not in self._pending:
                    pending = PendingQuery(query, asyncio.get_running_loop().create_future(), is_ahead=True)
                    self._pending[query] = pending
                    return pending
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(queue.arrived.wait(), QUIET_S - quiet_s if queue.ahead else None)
        return queue.pending.popleft()


def _trace_of(query: EstimateQuery) -> EstimateQuery:
    """What stands for all queries that one trace answers."""
    return query.model_copy(update={"batch": 1, "memory": None})


class AnswerCache:
    """A bounded memory of answers.

    >>> kept = AnswerCache(max_bytes=10)
    >>> kept.put("a", (200, b"12345678")); kept.put("b", (200, b"1234"))
    >>> kept.get("a") is None, kept.get("b")
    (True, (200, b'1234'))
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._answers: OrderedDict[object, tuple[int, bytes]] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, key: object) -> bool:
        return key in self._answers

    def get(self, key: object) -> tuple[int, bytes] | None:
        """The answer to a question that was asked before."""
        found = self._answers.get(key)
        if found is not None:
            self._answers.move_to_end(key)
        return found

    def put(self, key: object, answer: tuple[int, bytes]) -> None:
        """Keep an answer, and drop old ones."""
        if key in self._answers:
            self.num_bytes -= len(self._answers.pop(key)[1])
        self._answers[key] = answer
        self.num_bytes += len(answer[1])
        while self.num_bytes > self._max_bytes:
            _, (_, dropped) = self._answers.popitem(last=False)
            self.num_bytes -= len(dropped)


def neighbours(query: EstimateQuery, before: EstimateQuery | None = None) -> list[EstimateQuery]:
    """Queries that differ by a move of one slider, the likeliest first.

    Args:
        before: the query before it: a slider that moves is likely to move on in the same direction.
    """
    entry = find_entry(query.model)
    longest = entry.max_positions if entry is not None else 512
    before = before or query
    batches = _nearest(BATCH_STOPS, query.batch, NUM_BATCHES, query.batch - before.batch)
    seqs = _nearest([n for n in SEQ_STOPS if n <= longest], query.seq, NUM_SEQS, query.seq - before.seq)
    return list(_changed(query, batches, seqs))


def _changed(query: EstimateQuery, batches: Sequence[int], seqs: Sequence[int]) -> Iterator[EstimateQuery]:
    for batch, seq in zip_longest(batches, seqs):
        if batch is not None:
            yield query.model_copy(update={"batch": batch, "micro_batch": None})
        if seq is not None:
            yield query.model_copy(update={"seq": seq})


def _nearest(stops: Sequence[int], here: int, count: int, direction: int) -> list[int]:
    """The stops around a place, the next two in the direction first, then those beside it; the place itself left out.

    >>> _nearest([1, 2, 3, 4, 5, 6], 3, 4, 1), _nearest([1, 2, 3, 4, 5, 6], 3, 4, -1)
    ([4, 5, 2, 6], [2, 1, 4, 5])
    """
    below = [n for n in stops if n < here][::-1]
    above = [n for n in stops if n > here]
    ahead, behind = (below, above) if direction < 0 else (above, below)
    mixed = [n for pair in zip_longest(behind, ahead[2:]) for n in pair if n is not None]
    return [*ahead[:2], *mixed][:count]
