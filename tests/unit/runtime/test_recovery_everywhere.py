"""Memory runs out at every single allocation of a first step and of a later one: no step ends otherwise for it."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.unit.runtime.failures import KINDS, quick, train

KIND = KINDS["dropout"]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def test_a_failure_at_every_allocation_of_the_first_step_leaves_no_trace() -> None:
    expected = train(KIND, num_steps=1)
    for n in range(1, expected.last_allocations[0] + 1):
        assert train(KIND, [n], num_steps=1).equals(expected), n


def test_a_failure_at_every_allocation_of_later_steps_leaves_no_trace() -> None:
    """Step by step one allocation further, of all that every step makes; the first and the last step are left alone."""
    count = min(after - before for before, after in pairwise(train(KIND).last_allocations))
    places = [0, *range(1, count + 1), 0]
    expected = train(KIND, num_steps=len(places))
    found = train(KIND, num_steps=len(places), places=places)
    assert found.equals(expected)
    assert found.last_allocations[-1] > expected.last_allocations[-1]
    assert (found.micro_batch, expected.num_recoveries) == (expected.micro_batch, 0)
    assert count // 2 < found.num_recoveries < count  # the others were inside the optimizer's step


def test_the_steps_after_a_first_one_that_failed_are_as_they_would_be() -> None:
    expected = train(KIND)
    for n in range(1, expected.last_allocations[0] + 1, 40):
        assert train(KIND, [n]).equals(expected), n
