"""`Heartbeat`: ranks see that the others are there, so that a cut link does not leave them waiting for ever.

A killed process closes its connections, and the others learn of it at once. A machine that is gone, or a cable, closes
nothing: then only silence tells. Each rank leaves a sign of life at the meeting point every few seconds and looks for
the next rank's; whoever hears nothing for long tells why and ends its process, since nothing else wakes a thread that
waits in a collective.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

BEAT_S = 2.0
SILENCE_S = 20.0
"""Without a sign of life for so long, a rank counts as gone."""
PATIENCE_S = 5.0
"""What the meeting point may take to answer."""
EXIT_CODE = 1


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
        beat_s, silence_s: how often, and how long is too long.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        connect: Callable[[], Any] = meeting_point,
        on_silence: Callable[[str], None] | None = None,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._rank, self._size, self._next = rank, size, (rank + 1) % size
        self._connect, self._on_silence = connect, on_silence or self._end
        self._beat_s, self._silence_s = beat_s, silence_s
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
        """The run is over: silence means nothing any more."""
        self._stopped.set()

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
