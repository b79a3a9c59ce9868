"""The folder `receipts` of the repository: every receipt is good, and what counts as measured is what they say."""

import json
from pathlib import Path

from vramfit.cuda.kernels import script
from vramfit.records.receipt import measured_pairs, read_receipt
from vramfit.runtime.receipts import card_problems, repeat_prediction

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / "receipts").glob("*.json"))
OWN = "benchmarks/"
"""Pairs that this project measured name their results."""


def test_every_receipt_is_whole_of_a_known_card_and_its_prediction_is_repeated_or_marked() -> None:
    """`tests/unit/runtime/test_receipts.py` shows what each of these finds."""
    for path in PATHS:
        receipt = read_receipt(path)
        words, is_possible = repeat_prediction(receipt)
        assert list(card_problems(receipt)) == [], path.name
        assert is_possible, f"{path.name}: {words}"
    assert (ROOT / "receipts" / "README.md").is_file()


def test_what_counts_as_measured_is_what_receipts_and_results_say() -> None:
    entries = json.loads((Path(script.__file__).parents[1] / "verified.json").read_text(encoding="utf-8"))
    own = [entry for entry in entries if entry["by"].startswith(OWN)]
    others = {(tuple(e["torch"]), tuple(e["compute_capability"])) for e in entries if e not in own}
    assert own
    assert all((ROOT / entry["by"]).is_file() for entry in own)
    assert others == set(measured_pairs(map(read_receipt, PATHS)))
    assert len(script.VERIFIED) == len(entries)
