"""Published measurements: complete, predicted before they were compared, and shown as they came out."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import published_cards
import published_page
from published_page import Compared

MEASUREMENTS = json.loads(published_cards.MEASUREMENTS.read_text(encoding="utf-8"))
PREDICTIONS = json.loads(published_cards.PREDICTIONS.read_text(encoding="utf-8"))
ROWS = {row["id"]: row for row in MEASUREMENTS["rows"]}
FOUND = published_page.compare(MEASUREMENTS, PREDICTIONS)


def test_there_are_rows_of_five_cards_with_sources() -> None:
    promised = [c for c in FOUND if c.is_promised and c.is_repeatable]
    assert len(ROWS) == len(MEASUREMENTS["rows"])
    assert len(promised) >= 25
    assert len({c.row["card"] for c in promised}) >= 5
    for row in ROWS.values():
        assert MEASUREMENTS["sources"][row["source"]]["address"].startswith("https://")


def test_a_prediction_is_for_the_settings_of_its_row_and_never_sees_the_measurement() -> None:
    for name, row in ROWS.items():
        assert PREDICTIONS[name]["settings"] == published_cards.digest_of(row)
        assert published_cards.digest_of(row | {"measured": 1, "failed": 2}) == PREDICTIONS[name]["settings"]


@pytest.mark.parametrize(
    "name",
    [
        "rtx-4090/bert-base-uncased/edge",
        "a100-80gb/bge-base/8x256",
        "rtx-2060/distilbert/4x128/sdpa",
        "t4/distilbert-base-uncased/4x128/allocated",
        "a10g/roberta-base/2x16/reserved",
    ],
)
def test_a_kept_prediction_is_that_of_today(name: str) -> None:
    assert published_cards.predict(published_cards.settings_of(ROWS[name])) == PREDICTIONS[name]["predicted"]


def test_the_page_is_that_of_the_rows() -> None:
    assert published_page.PAGE.read_text(encoding="utf-8") == published_page.make_page(MEASUREMENTS, PREDICTIONS)


def test_a_prediction_below_the_measurement_without_a_reason_is_not_let_through() -> None:
    row = ROWS["a10g/roberta-base/2x16/allocated"] | {"id": "l4/new"}
    with pytest.raises(AssertionError, match="no explanation for"):
        published_page.explained([Compared(row, row["measured"] - 1000)], PREDICTIONS)


@pytest.mark.parametrize(
    ("figure", "predicted", "is_below"),
    [
        ({"figure": "allocated", "measured": 1000, "resolution": 10}, 995, False),  # within what was rounded
        ({"figure": "allocated", "measured": 1000, "resolution": 10}, 980, True),
        ({"figure": "largest_batch", "measured": 662, "failed": 664, "resolution": 2}, 663, False),
        ({"figure": "largest_batch", "measured": 662, "failed": 664, "resolution": 2}, 664, True),
    ],
)
def test_below_is_beyond_the_rounding_of_what_was_published(
    figure: dict[str, Any], predicted: int, is_below: bool
) -> None:
    assert Compared(figure, predicted).is_below is is_below
