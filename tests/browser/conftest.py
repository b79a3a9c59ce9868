"""The page's server and a browser, one of each for all tests here."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.browser.chromium import INSTALL, Browser, Page, browser, executable


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """A running `vramfit web`."""
    command = [sys.executable, "-m", "vramfit", "web", "--port", "0", "--json", "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        text = ""
        for line in process.stdout:
            text += line
            if line.startswith("}"):
                break
        yield json.loads(text)["url"]
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="session")
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
