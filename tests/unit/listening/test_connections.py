"""Which connections may be open, and which is closed first, by a clock that the test moves."""

import pytest

from vramfit.listening import connections as module
from vramfit.listening.connections import BODY_S, HEADERS_S, UNREAD_S, Awaits, Connections, most_connections


class Client:
    """A connection that remembers whether it was dropped."""

    def __init__(self, address: str = "10.0.0.1") -> None:
        self.address = address
        self.unsent_bytes = 0
        self.is_open = True

    def drop(self) -> None:
        self.is_open = False


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "monotonic", made)
    return made


def opened(
    all_open: Connections, number: int, awaits: Awaits = Awaits.HEADERS, address: str = "10.0.0.1"
) -> list[Client]:
    made = [Client(address) for _ in range(number)]
    for one in made:
        assert all_open.admit(one)
        all_open.move(one, awaits)
    return made


def test_a_newcomer_takes_the_place_of_the_oldest_that_sent_no_headers() -> None:
    all_open = Connections(8)
    silent, idle = opened(all_open, 4), opened(all_open, 4, Awaits.NEXT)
    newcomer = Client()
    assert all_open.admit(newcomer)
    assert [one.is_open for one in silent] == [False, True, True, True]
    assert all(one.is_open for one in [*idle, newcomer])
    assert len(all_open) == 8


@pytest.mark.parametrize("awaits", [Awaits.HEADERS, Awaits.BODY])
def test_a_crowd_pays_for_newcomers_and_no_newcomer_for_the_crowd(awaits: Awaits) -> None:
    all_open = Connections(100)
    crowd, idle = opened(all_open, 60, awaits), opened(all_open, 40, Awaits.NEXT)
    newcomers = opened(all_open, 10)
    assert all(one.is_open for one in [*idle, *newcomers])
    assert [one.is_open for one in crowd] == [False] * 10 + [True] * 50


def test_where_few_are_unfinished_the_oldest_idle_connection_goes_and_answers_never() -> None:
    all_open = Connections(16)
    asked = opened(all_open, 4, Awaits.ANSWER)
    sending, idle = opened(all_open, 2, Awaits.BODY), opened(all_open, 10, Awaits.NEXT)
    (newcomer,) = opened(all_open, 1)
    assert [one.is_open for one in idle] == [False] + [True] * 9
    all_open.move(newcomer, Awaits.ANSWER)
    opened(all_open, 11, Awaits.ANSWER)
    assert not any(one.is_open for one in [*idle, *sending])
    assert all(one.is_open for one in [*asked, newcomer])
    assert not all_open.admit(Client())  # all of them wait for answers
    assert len(all_open) == 16


def test_one_address_cannot_have_all_places_for_unfinished_requests() -> None:
    all_open = Connections(100)
    other = opened(all_open, 5, address="10.0.0.2")
    crowd = opened(all_open, 300)
    assert sum(one.is_open for one in crowd) == all_open.most_unfinished == 75
    assert all(one.is_open for one in other)


def test_clients_behind_one_address_may_have_every_place_once_they_have_asked() -> None:
    all_open = Connections(100)
    assert all(one.is_open for one in opened(all_open, 50, Awaits.ANSWER) + opened(all_open, 50, Awaits.NEXT))


def test_the_crowd_pays_where_two_addresses_fill_the_server() -> None:
    all_open = Connections(10)
    few, crowd = opened(all_open, 3, address="10.0.0.2"), opened(all_open, 7)
    assert all_open.admit(Client("10.0.0.3"))
    assert all(one.is_open for one in few)
    assert not crowd[0].is_open


@pytest.mark.parametrize(("awaits", "limit_s"), [(Awaits.HEADERS, HEADERS_S), (Awaits.BODY, BODY_S)])
def test_a_request_that_does_not_come_whole_in_time_is_dropped(clock: Clock, awaits: Awaits, limit_s: float) -> None:
    all_open = Connections(10)
    (slow,) = opened(all_open, 1, awaits)
    clock.now = limit_s
    (young,) = opened(all_open, 1, awaits)
    all_open.drop_late()
    assert slow.is_open
    clock.now = limit_s + 1
    all_open.drop_late()
    assert (slow.is_open, young.is_open, len(all_open)) == (False, True, 1)


@pytest.mark.parametrize("awaits", [Awaits.ANSWER, Awaits.NEXT])
def test_an_answer_that_nobody_takes_is_not_kept_for_ever(clock: Clock, awaits: Awaits) -> None:
    all_open = Connections(10)
    still, reading = opened(all_open, 2, awaits)
    for step in range(4):
        clock.now = step * UNREAD_S * 0.6
        still.unsent_bytes, reading.unsent_bytes = 1000, 1000 - step
        all_open.drop_late()
    assert (still.is_open, reading.is_open) == (False, True)


def test_there_are_fewer_connections_than_file_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (1024, 1024))
    monkeypatch.setattr(module, "_num_open", lambda: 30)
    assert most_connections() == 1024 - 30 - module.SPARE_HANDLES
    monkeypatch.setattr("resource.getrlimit", lambda which: (-1, -1))  # RLIM_INFINITY
    assert most_connections() == module.MAX_CONNECTIONS
