"""The documentation's site: built, and in a real Chromium, opened from a disk with the network off."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.chromium import Page
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="reference/python.html"' in home  # a file, so that the site opens from a disk
    assert (site / "reference" / "python.html").exists()


@pytest.mark.slow
def test_search_works_from_a_disk_and_tables_are_whole(page: Page, site: Path) -> None:
    page.resize(1300, 900)
    page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    page.open((site / "howto" / "import.html").as_uri())
    page.wait("typeof __index === 'object' && document.querySelector('iframe') !== null")
    page.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    page.call("Input.insertText", text="fragmentation")
    page.press("Shift")
    page.wait("document.querySelectorAll('.md-search-result__item').length > 0")
    for name in ("remedies", "peers", "accuracy", "study"):
        page.open((site / f"{name}.html").as_uri())
        tables = "[...document.querySelectorAll('.md-typeset__scrollwrap')]"
        assert page.evaluate(f"{tables}.length") > 0
        assert page.evaluate(f"{tables}.filter(t => t.scrollWidth > t.clientWidth).length") == 0, name
    assert page.complaints == []
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "blob"}
