"""Small tensors everywhere: threads inside one process would only wait for each other."""

import gc

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _imported_things_are_no_garbage() -> None:
    """What is alive before a file's first test stays: collections, of which tests make many, need not look at it."""
    gc.collect()
    gc.freeze()
