"""`RankVotes`: ranks vote before they meet in a collective, so that none waits for one that is not coming.

A vote is a handful of numbers on the host, reduced over gloo. Whoever has run out of memory votes so instead of going
on; all others learn of it at their next vote, which is where they are or where they are bound for: nothing but a vote
comes before a collective.

`Heartbeat` notices a cut link. A killed process closes its connections, and the others learn of it at once. A machine
that is gone, or a cable, closes nothing: then only silence tells. Each rank leaves a sign of life at the meeting point
every few seconds and looks for the next rank's; whoever hears nothing for long says why and ends its process, since
nothing else wakes a thread that waits in a collective.
"""

import os
import pickle
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.errors import RankFailed
from vramfit.runtime.distributed import here
from vramfit.step.recovery import is_out_of_memory

COLLECTIVE_TIMEOUT_S = 1800.0
"""A rank may read data or save for long; one that is gone is noticed otherwise."""
BEAT_S = 2.0
SILENCE_S = 20.0
"""Without a sign of life for so long, a rank counts as gone."""
PATIENCE_S = 5.0
"""What the meeting point may take to answer."""
EXIT_CODE = 1
WELL, OUT_OF_MEMORY, FAILED = 0, 1, 2
NUM_VALUES = 6
"""Numbers that a vote can carry beside how its rank is."""
LAST_WORDS_S = 2 * BEAT_S
"""How long survivors wait for each other, and for last words, after a connection broke. Processes of the same machine
that are seen to run get `SILENCE_S`, and those that are seen to have ended get no time."""
RESUMING = "start again with the ranks that are left and --resume (resume=True): the last checkpoint is whole"


class PeerOutOfMemory(torch.OutOfMemoryError):
    """Another rank ran out of memory: this one drops its window too."""


class RankVotes:
    """The votes of the ranks.

    Args:
        rank: of this process.
        size: processes in all.
        group: what they go through; None makes a group of gloo.
    """

    def __init__(self, rank: int, size: int, group: Any = None) -> None:
        self.rank, self.size = rank, size
        self.num_votes = 0
        limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        self._group: Any = dist.new_group(backend="gloo", timeout=limit) if group is None else group
        self._store = dist.distributed_c10d._get_default_store()
        with suppress(RuntimeError):  # PyTorch's fake group has a store that keeps nothing
            self._store.set(f"vramfit/process/{rank}", here.name_of(os.getpid()))
        self._parted = False

    def agree(self, *values: int) -> tuple[int, ...]:
        """All ranks are well; gives the largest of each value.

        Raises:
            PeerOutOfMemory: some rank is out of memory.
            RankFailed: some rank has stopped, or is gone.
        """
        return self._vote(WELL, values)

    def agree_on(self, value: int, what: str) -> None:
        """All ranks have the same value.

        Raises:
            RankFailed: they do not.
        """
        most, least = self.agree(value, -value)
        if most != -least:
            raise RankFailed(f"the ranks do not have the same {what}", hint="give every rank the same data, in order")

    def report(self, error: BaseException) -> None:
        """This rank is out of memory; comes back once all know.

        Raises:
            RankFailed: some rank has stopped meanwhile.
        """
        if isinstance(error, PeerOutOfMemory):
            return  # they know
        try:
            self._vote(OUT_OF_MEMORY, ())
        except PeerOutOfMemory:
            return

    def give_up(self, error: BaseException) -> None:
        """This rank stops; the others are told why and stop too."""
        if self._parted or isinstance(error, RankFailed):
            return
        self._parted = True
        try:
            self._store.set(f"vramfit/reason/{self.rank}", _in_words(error))
            self._vote(FAILED, ())
        except (RankFailed, RuntimeError, PeerOutOfMemory):
            return
        finally:
            self._keep_meeting_point(range(self.size))

    def sum(self, value: float) -> float:
        """The sum over all ranks; to be called where `agree` has just gone well."""
        return float(self._reduce([value], torch.float64, dist.ReduceOp.SUM)[0])

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Which flags some rank has set; to be called where `agree` has just gone well."""
        return [bool(flag) for flag in self._reduce(flags, torch.uint8, dist.ReduceOp.MAX)]

    def broadcast(self, value: Any) -> Any:
        """What rank 0 has, for all; anything that pickles."""
        with _disable_current_modes():
            content = pickle.dumps(value) if self.rank == 0 else b""  # what fails here fails before the vote
            (size,) = self.agree(len(content))
            held = torch.frombuffer(bytearray(content or bytes(size)), dtype=torch.uint8)
            return pickle.loads(self.broadcast_tensor(held).numpy().tobytes())

    def broadcast_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in the host's memory, written into the tensor given."""
        with _disable_current_modes():
            self._guard(lambda: dist.broadcast(tensor, src=0, group=self._group))
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """What every rank has, by rank."""
        held: list[Any] = [None] * self.size
        with _disable_current_modes():
            content = pickle.dumps(value)
            self.agree()
            self._guard(lambda: dist.all_gather_object(held, content, group=self._group))
        return [pickle.loads(one) for one in held]

    def _vote(self, state: int, values: Sequence[int]) -> tuple[int, ...]:
        assert len(values) <= NUM_VALUES
        self.num_votes += 1
        who = self.size - self.rank if state != WELL else 0  # of several, the lowest rank is named
        ballot = [state, who, *values, *(0 for _ in range(NUM_VALUES - len(values)))]
        made = self._reduce(ballot, torch.int64, dist.ReduceOp.MAX)
        worst, rank = made[0], self.size - made[1]
        if worst == FAILED:
            raise self._failed()
        if worst == OUT_OF_MEMORY:
            raise PeerOutOfMemory(f"rank {rank} ran out of memory")
        return tuple(made[2 : 2 + len(values)])

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Inside is a collective of PyTorch's own, which all have agreed to. What fails there cannot be voted on, since
        the others wait in it: this rank leaves its reason and ends, and that ends them.

        Raises:
            RankFailed: this rank ran out of memory there, or another one has gone.
        """
        try:
            yield
        except BaseException as error:
            if not is_out_of_memory(error) and isinstance(error, RuntimeError):
                raise self._lost(error) from None
            self._parted = True
            with suppress(RuntimeError):
                self._store.set(f"vramfit/reason/{self.rank}", _in_words(error))
            if not is_out_of_memory(error):
                raise
            said = f"rank {self.rank} ran out of memory inside a collective, where others wait: {_in_words(error)}"
            raise RankFailed(said, rank=self.rank, reason=_in_words(error), hint=RESUMING) from None

    def close(self) -> None:
        """All have agreed, and nothing is voted on any more.

        Python must not end while a thread of gloo lets go of a tensor, or C++ aborts the process: its threads end
        with the group.
        """
        self._group = None

    def _reduce(self, values: Sequence[float], dtype: torch.dtype, operation: Any) -> list[Any]:
        """On the host, out of sight of an emulated GPU."""
        with _disable_current_modes():
            tensor = torch.tensor(values, dtype=dtype)
            self._guard(lambda: dist.all_reduce(tensor, op=operation, group=self._group))
            return tensor.tolist()

    def _guard(self, collective: Any) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise self._lost(error) from None

    def _failed(self) -> RankFailed:
        """Somebody has left a reason."""
        self._parted = True
        found = RankFailed("another rank has stopped", hint=RESUMING)
        with suppress(RuntimeError):
            for rank in range(self.size):
                reason = self._reason(rank)
                if reason is not None and rank != self.rank:
                    found = RankFailed(f"rank {rank} has stopped: {reason}", rank=rank, reason=reason, hint=RESUMING)
                    break
            self._store.set(f"vramfit/knows/{self.rank}", "1")
        return found

    def _keep_meeting_point(self, ranks: Sequence[int]) -> None:
        """The meeting point may go with rank 0's process: it stays until these know what they need to."""
        if self.rank == 0:
            with suppress(RuntimeError):
                self._without("knows", ranks)

    def _lost(self, error: RuntimeError) -> RankFailed:
        """A connection broke: whose, found by who still answers."""
        self._parted = True
        said = _first_sentence(error)
        try:
            self._store.set(f"vramfit/alive/{self.rank}", "1")
            beats = beats_of(range(self.size))
            silent = self._without("alive", range(self.size))
            later = beats_of(silent)
            silent = [rank for rank in silent if later.get(rank) == beats.get(rank)]  # others are in a long pass
            reasons = {rank: self._reason(rank) for rank in range(self.size) if rank != self.rank}
            self._store.set(f"vramfit/knows/{self.rank}", "1")
            self._keep_meeting_point([rank for rank in range(self.size) if rank not in silent])
        except RuntimeError:
            return RankFailed(
                f"rank {self.rank} lost the others, and the meeting point too: rank 0 was killed, its machine is gone, "
                f"or the network is cut ({said})",
                reason=said,
                hint=RESUMING,
            )
        for rank, reason in reasons.items():
            if reason is not None:
                return RankFailed(f"rank {rank} has stopped: {reason}", rank=rank, reason=reason, hint=RESUMING)
        gone = silent[0] if silent else None
        who = "another rank" if gone is None else f"rank {gone}"
        reason = "it ended without a word: killed, out of host memory, or its machine is gone"
        return RankFailed(f"{who} is lost: {reason}", rank=gone, reason=reason, hint=RESUMING)

    def _without(self, word: str, ranks: Sequence[int]) -> list[int]:
        """Of these other ranks, those that do not say a word in time."""
        started = time.monotonic()
        while True:
            running = {r: self._is_running(r) for r in ranks if r != self.rank}  # before the look: last words count
            silent = [r for r in running if not self._store.check([f"vramfit/{word}/{r}"])]
            awaited = [running[r] for r in silent if running[r] is not False]
            if not awaited or time.monotonic() - started > (SILENCE_S if all(awaited) else LAST_WORDS_S):
                return silent
            time.sleep(0.1)

    def _is_running(self, rank: int) -> bool | None:
        """Whether a rank's process runs; None where that cannot be seen from this machine."""
        name = f"vramfit/process/{rank}"
        return here.is_running(self._store.get(name).decode()) if self._store.check([name]) else None

    def _reason(self, rank: int) -> str | None:
        name = f"vramfit/reason/{rank}"
        return self._store.get(name).decode() if self._store.check([name]) else None


def _first_sentence(error: RuntimeError) -> str:
    """What gloo says, without where it is in its source and what it guesses."""
    line = re.sub(r"^\[[^\]]*\]\s*", "", str(error).splitlines()[0])
    return line.partition(" This is typically")[0].rstrip(". ")


def _in_words(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:600]


def meeting_point() -> Any:
    """A connection of our own to where the ranks met: waiting on it holds nobody else up.

    Raises:
        RuntimeError, OSError: it cannot be reached.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection((host, port), timeout=PATIENCE_S):
        pass  # a store would try for long, and print where it is in the source of PyTorch
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S))


def beats_of(ranks: Iterable[int]) -> dict[int, bytes]:
    """The last sign of life of each rank that gives any; none where the meeting point cannot be asked."""
    try:
        store = meeting_point()
        names = {rank: f"vramfit/beat/{rank}" for rank in ranks}
        return {rank: store.get(name) for rank, name in names.items() if store.check([name])}
    except (RuntimeError, OSError, KeyError):
        return {}


class Heartbeat:
    """The signs of life of one rank, and the watch over the next.

    Args:
        rank: of this process.
        size: processes in all.
        connect: gives a connection to the meeting point; again whenever it broke.
        on_silence: called with what is wrong, once; by default it is said, and the process ends.
        times_s: how often, and how long is too long.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        connect: Callable[[], Any] = meeting_point,
        on_silence: Callable[[str], None] | None = None,
        times_s: tuple[float, float] = (BEAT_S, SILENCE_S),
    ) -> None:
        self._rank, self._size, self._next = rank, size, (rank + 1) % size
        self._connect, self._on_silence = connect, on_silence or self._end
        self._beat_s, self._silence_s = times_s
        self._stopped = threading.Event()
        self._heard, self._heard_at = b"", time.monotonic()
        self._reached_at = time.monotonic()
        # two of them: where a cable is cut, what asks the meeting point waits for an answer for ever
        self._threads = [
            threading.Thread(target=run, name=f"vramfit-{run.__name__.strip('_')}", daemon=True)
            for run in (self._beat, self._watch)
        ]

    def start(self) -> None:
        """Begin to beat and to listen."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """The run is over: silence means nothing any more.

        Python must not end while a thread is inside a call of the store: C++ then aborts the process.
        """
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(PATIENCE_S)

    def _beat(self) -> None:
        """Leave signs of life, and look for those of the next rank."""
        store: Any = None
        count = 0
        while not self._stopped.wait(self._beat_s):
            try:
                store = self._connect() if store is None else store
                count += 1
                store.set(f"vramfit/beat/{self._rank}", str(count))
                found = store.get(self._name()) if store.check([self._name()]) else b""
            except (RuntimeError, OSError):
                store = None
                continue
            now = time.monotonic()
            if found != self._heard or now - self._reached_at > 2 * self._beat_s:
                self._heard, self._heard_at = found, now  # while nobody could be reached, nobody could be heard
            self._reached_at = now

    def _watch(self) -> None:
        while not self._stopped.wait(self._beat_s):
            now = time.monotonic()
            if now - self._reached_at > self._silence_s:
                self._tell("the meeting point, on rank 0's machine, does not answer", now - self._reached_at)
                return
            if now - self._heard_at > self._silence_s + self._beat_s:
                self._tell(f"rank {self._next} gives no sign of life", now - self._heard_at)
                return

    def _name(self) -> str:
        return f"vramfit/beat/{self._next}"

    def _tell(self, what: str, silent_s: float) -> None:
        if not self._stopped.is_set():
            self._on_silence(
                f"{what} for {silent_s:.0f} s: the network is cut, or a machine is gone; rank {self._rank} of "
                f"{self._size} stops"
            )

    @staticmethod
    def _end(what: str) -> None:
        """Nothing else ends a thread that waits in a collective."""
        hint = "start again where the machines reach each other, with --resume: the last checkpoint is whole"
        sys.stderr.write(f"Error: {what}\n  → {hint}\n")
        sys.stderr.flush()
        os._exit(EXIT_CODE)
