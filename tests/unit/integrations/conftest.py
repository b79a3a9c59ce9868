"""Every `train` of a Trainer collects garbage; what was imported before need not be looked through each time."""

import gc
from collections.abc import Iterator

import pytest
import transformers
from accelerate.state import AcceleratorState


@pytest.fixture(scope="package", autouse=True)
def _imported_things_are_no_garbage() -> Iterator[None]:
    assert transformers.Trainer  # imported in full now
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_precision_is_left_over() -> Iterator[None]:
    """Trainers of one process share what accelerate knows of it."""
    yield
    AcceleratorState._reset_state()
