"""The pictures under docs/images: the page and a report, at the width of a desktop and of a phone, light and dark.

    python scripts/take_screenshots.py

They are looked at by whoever changes the page; `vramfit[web]`, websocket-client and Chromium are needed.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.web_load import address_of  # noqa: E402
from tests.browser.chromium import Browser, Page, browser  # noqa: E402

import vramfit  # noqa: E402

IMAGES = ROOT / "docs" / "images"
LOOKS = (
    ("desktop-light", 1280, 900, False),
    ("desktop-dark", 1280, 900, True),
    ("phone-light", 390, 844, False),
    ("phone-dark", 390, 844, True),
)
STATE = "?model=bert-large-uncased&seq=512&batch=16&precision=amp-fp16"
SETTLED = (
    "!['wait'].includes(document.getElementById('answer').dataset.tone) && document.querySelector('#row .n') && "
    "!document.querySelector('#row .waiting') && document.getElementById('plan').getAttribute('aria-busy') === 'false'"
)
DRAWN = "[...document.querySelectorAll('.figure')].every(f => f.querySelector('svg.main-svg'))"


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen(
        [sys.executable, "-m", "vramfit", "web", "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        address = address_of(server)
        with browser() as chromium, TemporaryDirectory() as folder:
            plan = Path(folder) / "plan.json"
            vramfit.plan("bert-large-uncased", batch=32, seq=512, gpu="t4").save(plan)
            subprocess.run([sys.executable, "-m", "vramfit", "report", str(plan)], check=True)
            for name, width, height, dark in LOOKS:
                _take(chromium, f"web-{name}", address + STATE, SETTLED, width, height, dark)
                _take(chromium, f"report-{name}", plan.with_suffix(".html").as_uri(), DRAWN, width, 2 * height, dark)
    finally:
        server.terminate()
        server.wait(20)


def _take(chromium: Browser, name: str, address: str, settled: str, width: int, height: int, dark: bool) -> None:
    page: Page
    with chromium.page() as page:
        page.resize(width, height, dark=dark, phone=width < 500)
        page.open(address)
        page.wait(settled)
        page.evaluate("new Promise(done => setTimeout(done, 400))")
        page.screenshot(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
