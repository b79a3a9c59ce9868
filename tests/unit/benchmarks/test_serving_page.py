"""The figures on serving are those of the committed results, in which everything held."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import serving_page


def test_the_page_has_the_figures_of_the_results() -> None:
    text = serving_page.PAGE.read_text(encoding="utf-8")
    assert serving_page.BLOCK.search(text)
    assert serving_page.fill(text) == text


def test_everything_held_in_every_run() -> None:
    results = serving_page.read_results()
    assert {result["part"] for result in results} == {"load", "faults"}
    assert all(result["held"] for result in results)


def test_a_gpu_is_named_with_its_own_memory_and_beside_one_at_a_time() -> None:
    part = {"num_requests": 5000, "num_lost": 0, "num_wrong": 0, "num_5xx": 0, "largest_difference": 1e-6}
    part |= {"p50_s": 0.02, "p99_s": 0.05, "texts_per_s": 2000.4, "texts_per_s_one_at_a_time": 400.2}
    result = {"part": "load", "device": "NVIDIA H200", "worker_memory_bytes": 2**30, "plain": part}
    line = serving_page.table([result]).splitlines()[-1]
    assert line.startswith("| NVIDIA H200: single texts | 5,000 | 0 | 0 | 0 | 1.0e-06 | 1,024 MiB | 20 ms | 50 ms |")
    assert line.endswith("| 2,000; one at a time 400 |")
