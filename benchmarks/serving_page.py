"""The table of measurements in docs/sagemaker.md, made from the results of `benchmarks/serving.py`.

python benchmarks/serving_page.py
"""

import json
import re
from pathlib import Path
from typing import Any

import pages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "sagemaker.md"
RESULTS = ROOT / "benchmarks" / "results"
HEAD = ("", "requests", "lost", "wrong", "5xx", "largest difference", "memory", "p50", "p99", "texts/s")
KINDS = {"hard": "everything", "plain": "single texts"}
BLOCK = re.compile(r"(<!-- figures: serving -->\n).*?(\n<!-- end -->)", re.DOTALL)
Row = list[str | None]


def main() -> None:
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def fill(text: str) -> str:
    """The page with the table that the results give."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{table(read_results())}\n{found[2]}", text)


def read_results() -> list[dict[str, Any]]:
    """What was measured, a record a file."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("serving_*.json"))]


def table(results: list[dict[str, Any]]) -> str:
    """A line for each kind of load, and for each run with faults."""
    rows: list[Row] = []
    for result in results:
        if result["part"] == "faults":
            rows.append(_faults(result))
        else:
            rows += [_load(result, kind) for kind in KINDS if kind in result]
    return pages.table(HEAD, rows)


def _load(result: dict[str, Any], kind: str) -> Row:
    part, on_gpu = result[kind], result["device"] != "cpu"
    num_bytes = result["worker_memory_bytes"] if on_gpu else part["resident_most_bytes"]
    alone = part["texts_per_s_one_at_a_time"]
    fast = f"{part['texts_per_s']:,.0f}; one at a time {alone:,.0f}" if on_gpu else None
    times = [f"{1000 * part[name]:,.0f} ms" for name in ("p50_s", "p99_s")]
    return [f"{_where(result)}: {KINDS[kind]}", *_right(part["num_requests"], part), _mib(num_bytes), *times, fast]


def _faults(result: dict[str, Any]) -> Row:
    what = (
        f"{_where(result)}: {result['seconds'] / 60:.0f} minutes; {result['num_hung_up']} clients hang up, memory "
        f"runs out {result['num_recoveries']} times, SIGTERM"
    )
    found = result | {"num_5xx": result["num_5xx_before_the_end"]}
    return [what, *_right(result["accepted"], found), _mib(result["resident_most_bytes"]), None, None, None]


def _where(result: dict[str, Any]) -> str:
    return f"{result['cores']} CPU cores" if result["device"] == "cpu" else str(result["device"])


def _right(num_requests: int, found: dict[str, Any]) -> Row:
    counts = [str(found[name]) for name in ("num_lost", "num_wrong", "num_5xx")]
    return [f"{num_requests:,}", *counts, f"{found['largest_difference']:.1e}"]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


if __name__ == "__main__":
    main()
