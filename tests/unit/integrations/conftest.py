"""Every `train` of a Trainer collects garbage; what was imported before need not be looked through each time."""

import gc
from collections.abc import Iterator

import pytest
import transformers


@pytest.fixture(scope="package", autouse=True)
def _imported_things_are_no_garbage() -> Iterator[None]:
    assert transformers.Trainer  # imported in full now
    gc.freeze()
    yield
    gc.unfreeze()
