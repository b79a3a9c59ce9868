"""Small tensors everywhere: threads inside one process would only wait for each other."""

import gc
import os
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # in processes that tests start too
os.environ["VRAMFIT_CACHE"] = "off"  # traces that a user has kept are no answer to a test

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# how long an example takes says something of the machine, nothing of the code
settings.register_profile("vramfit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vramfit")


TOGETHER = ("tests/browser/", "tests/unit/runtime/distributed/", "tests/unit/web/")
"""Folders whose files share a browser, a server or a process that is forked."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one process does alone comes first: begun last, it would keep that one busy when the others have ended."""
    items.sort(key=lambda item: not item.nodeid.startswith(TOGETHER))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files of such a folder go to one process, so that what they share is made once."""
    from xdist.scheduler import LoadFileScheduling

    class LoadTogether(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return next((folder for folder in TOGETHER if file.startswith(folder)), file)

    return LoadTogether(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="module", autouse=True)
def _imported_things_are_no_garbage() -> None:
    """What is alive before a file's first test stays: collections, of which tests make many, need not look at it."""
    gc.collect()
    gc.freeze()
