"""Signs of life: silence is noticed and told, a slow meeting point is not taken for a lost rank."""

import threading
from collections.abc import Callable
from typing import Any

from vramfit.runtime.distributed.heartbeat import Heartbeat

BEAT_S, SILENCE_S, LIMIT_S = 0.01, 0.15, 10.0


class Store:
    """A meeting point on which the next rank beats, until it does not."""

    def __init__(self, beats: Callable[[], bytes]) -> None:
        self.values: dict[str, bytes] = {}
        self._beats = beats

    def set(self, name: str, value: str) -> None:
        self.values[name] = value.encode()

    def check(self, names: list[str]) -> bool:
        return True

    def get(self, name: str) -> bytes:
        return self._beats()


def told_by(connect: Callable[[], Any], *, limit_s: float = LIMIT_S) -> str | None:
    """What a heartbeat of rank 1 of 3 tells; None where it has nothing to tell in time."""
    told: list[str] = []
    happened = threading.Event()

    def hear(what: str) -> None:
        told.append(what)
        happened.set()

    heartbeat = Heartbeat(1, 3, connect=connect, on_silence=hear, beat_s=BEAT_S, silence_s=SILENCE_S)
    heartbeat.start()
    happened.wait(limit_s)
    heartbeat.stop()
    return told[0] if told else None


def test_a_rank_that_falls_silent_is_named() -> None:
    told = told_by(lambda: Store(lambda: b"7"))
    assert told is not None
    assert told.startswith(
        "rank 2 gives no sign of life for 0 s: the network is cut, or a machine is gone; rank 1 of 3"
    )


def test_a_meeting_point_that_never_answers_is_named() -> None:
    waits = threading.Event()
    told = told_by(lambda: Store(lambda: str(waits.wait(LIMIT_S)).encode()))
    waits.set()
    assert told is not None
    assert told.startswith("the meeting point, on rank 0's machine, does not answer")


def test_a_connection_that_breaks_is_made_again_and_life_goes_on() -> None:
    calls: list[int] = []

    def connect() -> Store:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("refused")
        beats = iter(range(3))

        def beat() -> bytes:
            try:
                return f"{len(calls)}.{next(beats)}".encode()
            except StopIteration:
                raise RuntimeError("connection reset") from None

        return Store(beat)

    assert told_by(connect, limit_s=4 * SILENCE_S) is None
    assert len(calls) > 3
