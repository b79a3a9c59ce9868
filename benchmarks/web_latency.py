"""From slider to new figure, measured in a real Chromium: how long does a reader of `vramfit web` wait?

    python benchmarks/web_latency.py --output benchmarks/results/web_latency_DATE.json

For every model: the first figure after it was chosen (nothing of it is known yet), then moves of a slider by one place
at a time. Batches are moved as soon as the figure before stands there, and at the pace of a hand; lengths right after
the choice, when each needs a trace of its own, and after a pause in which the server has prepared them. A time runs
from the event of the slider to the frame in which the new figure is drawn.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.web_load import address_of  # noqa: E402
from tests.browser.chromium import Browser, Page, browser  # noqa: E402

MODELS = ("bert-base-uncased", "bert-large-uncased", "deberta-v3-base", "modernbert-base")
FIGURES = "performance.getEntriesByName('vramfit-figure')"
NUM_MOVES = 10
PAUSE_S = 15.0
HAND_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "vramfit", "web", "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        address = address_of(server)
        with browser() as chromium:
            found = {model: measure(chromium, address, model) for model in MODELS}
    finally:
        server.terminate()
        server.wait(20)
    result = {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1), "milliseconds": found}
    text = json.dumps(result, indent=2)
    print(text)
    if given.output is not None:
        given.output.write_text(text + "\n")


def measure(chromium: Browser, address: str, model: str) -> dict[str, Any]:
    """Times of one model, in a tab of its own."""
    with chromium.page() as page:
        page.resize(1280, 900)
        page.open(f"{address}?model={model}&seq=256&batch=8&precision=amp-fp16&gpu=t4")
        page.wait(f"{FIGURES}.length")
        first = page.evaluate(f"{FIGURES}[0].duration")
        batches = [move(page, "batch-slider", 1) for _ in range(NUM_MOVES)]
        paced = [move(page, "batch-slider", 1, pause_s=HAND_S) for _ in range(NUM_MOVES)]
        lengths = [move(page, "seq-slider", 1) for _ in range(4)]
        time.sleep(PAUSE_S)
        prepared = [move(page, "seq-slider", -1, pause_s=HAND_S) for _ in range(NUM_MOVES)]
    return {
        "first": round(first),
        "batch, one move after another": summary(batches),
        "batch, at the pace of a hand": summary(paced),
        "length, right after the choice": summary(lengths),
        "length, prepared, at the pace of a hand": summary(prepared),
    }


def move(page: Page, slider: str, direction: int, pause_s: float = 0.0) -> float:
    """One place to the right or left, after a pause; milliseconds to the figure."""
    time.sleep(pause_s)
    before = page.evaluate(f"{FIGURES}.length")
    page.evaluate(f"document.getElementById('{slider}').focus()")
    page.press(*(("ArrowRight", "", 39) if direction > 0 else ("ArrowLeft", "", 37)))
    page.wait(f"{FIGURES}.length > {before}")
    return float(page.evaluate(f"{FIGURES}.at(-1).duration"))


def summary(times: list[float]) -> dict[str, float]:
    return {
        "median": round(median(times)),
        "longest": round(max(times)),
        "within 150 ms": sum(t <= 150 for t in times) / len(times),
    }


if __name__ == "__main__":
    main()
