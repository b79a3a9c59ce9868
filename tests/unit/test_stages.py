"""A call beside another: its result and its error arrive, what it tells is heard, and it ends with its block."""

import threading

import pytest
from tests.waiting import LIMIT_S

from vramfit.stages import beside, heard, tell

MANY = 10**8
"""Steps that nobody waits for."""


def test_a_result_and_what_was_told_arrive() -> None:
    stages: list[str] = []

    def call() -> int:
        tell("counting")
        return 3

    with heard(stages.append), beside(call) as made:
        assert made() == 3
    assert stages == ["counting"]


def test_the_error_of_a_call_is_raised_where_its_result_is_asked_for() -> None:
    problem = ValueError("no rows")

    def call() -> None:
        raise problem

    with pytest.raises(ValueError, match="no rows") as caught, beside(call) as made:
        made()
    assert caught.value is problem


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_call_whose_block_is_left_ends_where_it_tells_something(error: type[BaseException]) -> None:
    began = threading.Event()
    num_steps = 0

    def call() -> None:
        nonlocal num_steps
        began.set()
        while num_steps < MANY:
            tell("another step")
            num_steps += 1

    def leave() -> None:
        assert began.wait(LIMIT_S)
        raise error

    with pytest.raises(error), beside(call):
        leave()
    assert num_steps < MANY
