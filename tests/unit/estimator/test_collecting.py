"""Garbage is not collected while streams are made, and is again afterwards, whatever happened."""

import gc
from threading import Barrier, Thread

import pytest
from tests.waiting import LIMIT_S

from vramfit.errors import VramfitError
from vramfit.estimator.predict import estimate
from vramfit.estimator.traced import collection_paused
from vramfit.planner.plan import plan


def test_it_is_paused_inside_and_goes_on_outside_also_after_an_error() -> None:
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError), collection_paused():
        raise RuntimeError
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_one_thread_does_not_end_the_pause_of_another() -> None:
    both_in, one_out = Barrier(2, timeout=LIMIT_S), Barrier(2, timeout=LIMIT_S)
    seen: list[bool] = []

    def stay() -> None:
        with collection_paused():
            both_in.wait()
            one_out.wait()
            seen.append(gc.isenabled())

    thread = Thread(target=stay)
    with collection_paused():
        thread.start()
        both_in.wait()
    one_out.wait()
    thread.join(LIMIT_S)
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("ask", [plan, estimate])
def test_answers_that_are_errors_leave_it_on(ask: object) -> None:
    with pytest.raises(VramfitError):
        ask("bert-tiny", seq=10**6, batch=1, gpu="t4")  # type: ignore[operator]
    assert gc.isenabled()
