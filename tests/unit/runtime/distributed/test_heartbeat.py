"""Signs of life: silence is noticed and told, a slow meeting point is not taken for a lost rank."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.waiting import LIMIT_S

from vramfit.runtime.distributed import votes as module
from vramfit.runtime.distributed.votes import Heartbeat

BEAT_S, SILENCE_S = 0.01, 0.15


class Clock:
    """Stands for the module `time`: moves on when it is told, whatever the threads have to wait for each other."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


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


def told_by(
    connect: Callable[[], Any], happened: threading.Event | None = None, on_told: Callable[[], None] = lambda: None
) -> str | None:
    """What a heartbeat of rank 1 of 3 tells; None where something else happened first."""
    told: list[str] = []
    happened = happened or threading.Event()

    def hear(what: str) -> None:
        told.append(what)
        on_told()
        happened.set()

    heartbeat = Heartbeat(1, 3, connect=connect, on_silence=hear, times_s=(BEAT_S, SILENCE_S))
    heartbeat.start()
    assert happened.wait(LIMIT_S)
    heartbeat.stop()
    return told[0] if told else None


def test_a_rank_that_falls_silent_is_named(clock: Clock) -> None:
    def beat() -> bytes:
        clock.now += BEAT_S
        return b"7"

    told = told_by(lambda: Store(beat))
    assert told is not None
    assert re.match(
        r"rank 2 gives no sign of life for \d+ s: the network is cut, or a machine is gone; rank 1 of 3", told
    )


def test_a_meeting_point_that_never_answers_is_named(clock: Clock) -> None:
    waits = threading.Event()

    def beat() -> bytes:
        clock.now += 2 * SILENCE_S
        return str(waits.wait(LIMIT_S)).encode()

    told = told_by(lambda: Store(beat), on_told=waits.set)
    assert told is not None
    assert told.startswith("the meeting point, on rank 0's machine, does not answer")


def test_a_connection_that_breaks_is_made_again_and_life_goes_on(clock: Clock) -> None:
    calls: list[int] = []
    long_enough = threading.Event()

    def connect() -> Store:
        calls.append(1)
        clock.now += BEAT_S
        if len(calls) == 2:
            raise RuntimeError("refused")
        if clock.now > 4 * SILENCE_S:
            long_enough.set()
        beats = iter(range(3))

        def beat() -> bytes:
            clock.now += BEAT_S
            try:
                return f"{len(calls)}.{next(beats)}".encode()
            except StopIteration:
                raise RuntimeError("connection reset") from None

        return Store(beat)

    assert told_by(connect, long_enough) is None
    assert len(calls) > 3


def test_no_thread_is_inside_the_store_when_it_has_stopped(clock: Clock) -> None:
    inside, goes_on = threading.Event(), threading.Event()

    def beat() -> bytes:
        inside.set()
        assert goes_on.wait(LIMIT_S)
        return b"7"

    heartbeat = Heartbeat(1, 3, connect=lambda: Store(beat), times_s=(BEAT_S, SILENCE_S))
    heartbeat.start()
    assert inside.wait(LIMIT_S)
    threading.Timer(BEAT_S, goes_on.set).start()
    heartbeat.stop()
    assert not [thread for thread in heartbeat._threads if thread.is_alive()]
