"""Serving is tried on one thread, so that sums come out the same."""

from pathlib import Path

import pytest
from tests.unit.serve.small_servers import write_head


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Task → a folder with a model for it, made when it is first asked for."""
    place = tmp_path_factory.mktemp("heads")

    class Made(dict[str, Path]):
        def __missing__(self, task: str) -> Path:
            self[task] = write_head(place / task, task)
            return self[task]

    return Made()
