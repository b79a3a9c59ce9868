"""Tiny models are quickest on one thread; teachers are trained once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.runtime.training.small_runs import run, write_classes, write_model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained `teacher` of four layers, `train.csv` and `dev.csv`."""
    folder = tmp_path_factory.mktemp("taught")
    write_model(folder / "source", num_hidden_layers=4)
    write_classes(folder / "train.csv", num_rows=160)
    write_classes(folder / "dev.csv", num_rows=20, seed=5)
    run(folder, output=str(folder / "teacher"), epochs=4, lr=3e-3)
    return folder
