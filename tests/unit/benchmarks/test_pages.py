"""Tables as pages show them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import pages


def test_columns_of_numbers_are_set_right_and_words_left() -> None:
    rows = [["fp32", "3,324", "34 ms", None, "1,200 (2.1×)"], ["bf16 2", 800, "−0.5 %", None, "900"]]
    assert pages.table(["", "MiB", "time", "later", "tokens"], rows).splitlines() == [
        "|  | MiB | time | later | tokens |",
        "|---|---:|---:|---|---:|",
        "| fp32 | 3,324 | 34 ms | – | 1,200 (2.1×) |",
        "| bf16 2 | 800 | −0.5 % | – | 900 |",
    ]


def test_a_table_without_rows_has_its_head() -> None:
    assert pages.table(["a", "b"], []) == "| a | b |\n|---|---|"
