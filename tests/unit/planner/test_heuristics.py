"""The table of heuristics: each number says what it stands on, and the files that it names are there."""

import ast
import re
from itertools import pairwise
from pathlib import Path

from vramfit.planner import heuristics

SOURCE = Path(heuristics.__file__).read_text(encoding="utf-8")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
BASIS = re.compile(r"results/|not measured|no file keeps", re.IGNORECASE)


def test_each_number_says_what_it_stands_on() -> None:
    numbers = [(node, below) for node, below in pairwise(ast.parse(SOURCE).body) if isinstance(node, ast.Assign)]
    texts = {ast.unparse(node.targets[0]): ast.unparse(below) for node, below in numbers}
    del texts["PRICES"]
    assert len(texts) > 20
    assert [name for name, text in texts.items() if not BASIS.search(text.replace("\\n", " "))] == []


def test_each_price_says_what_it_stands_on() -> None:
    prices = SOURCE[SOURCE.index("PRICES = {") : SOURCE.index("SHARDS_PRICE")]
    assert len(BASIS.findall(prices)) == len(heuristics.PRICES)


def test_files_that_are_named_are_there() -> None:
    named = set(re.findall(r"results/([\w.-]+\.jsonl?)", SOURCE))
    assert named
    assert {name for name in named if not (RESULTS / name).exists()} == set()
