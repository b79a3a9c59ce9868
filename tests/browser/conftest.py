"""The page's server and a browser, one of each for all tests here."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import INSTALL, Browser, Page, browser, executable
from tests.unit.checkpoints.broken import load_script
from tests.waiting import ended_in_time, stop

web_load = load_script(Path(__file__).parents[2] / "benchmarks" / "web_load.py")


@pytest.fixture(scope="package")
def address() -> Iterator[str]:
    """A running `vramfit web`."""
    command = [sys.executable, "-m", "vramfit", "web", "--port", "0", "--json", "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        with ended_in_time(process):
            url = web_load.address_of(process)
        yield url
    finally:
        stop(process)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """A headless Chromium."""
    if executable() is None:
        pytest.skip(INSTALL)
    with browser() as running:
        yield running


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A tab of its own, as wide as a desktop's window."""
    with chromium.page() as tab:
        tab.resize(1280, 900)
        yield tab
