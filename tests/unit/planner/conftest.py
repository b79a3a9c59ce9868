"""Plans of one model at many budgets look at the same traces: they are kept for all tests of a file."""

from collections.abc import Iterator

import pytest

from vramfit.estimator import traced

NUM_KEPT = 512


@pytest.fixture(scope="module", autouse=True)
def _traces_are_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "MAX_KEPT", NUM_KEPT)
        yield
