"""Memory runs out at every single allocation of two steps: they and the one after them end as if it had not."""

from collections.abc import Iterator

import pytest
from tests.unit.runtime.failures import KINDS, quick, train

NUM_STEPS = 3


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def test_a_failure_at_every_allocation_of_the_first_two_steps_leaves_no_trace() -> None:
    kind = KINDS["dropout"]
    expected = train(kind, num_steps=NUM_STEPS)
    for n in range(1, expected.last_allocations[1] + 1):
        assert train(kind, [n], num_steps=NUM_STEPS).equals(expected), n
