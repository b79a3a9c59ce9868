"""Receipts: what they hold, what they refuse, and when they make a card count as measured."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.records.receipts import MIB, peaks, receipt

from vramfit.errors import VramfitError
from vramfit.records.codec import RecordError, to_json
from vramfit.records.receipt import (
    Receipt,
    measured_pairs,
    problems_of,
    read_receipt,
    write_receipt,
)


def test_a_receipt_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    write_receipt(receipt(), tmp_path / "t4.json")
    assert read_receipt(tmp_path / "t4.json") == receipt()


@pytest.mark.parametrize(
    ("field", "value"), [("num_retries", 7), ("gpu", "Tesla T5"), ("date", "2026-11-17"), ("digest", "sha256:0")]
)
def test_a_changed_file_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    data = json.loads(to_json(receipt()))
    (tmp_path / "r.json").write_text(json.dumps(data | {field: value}), encoding="utf-8")
    with pytest.raises(RecordError, match="the file is damaged or was changed"):
        read_receipt(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "a receipt has a few thousand bytes"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"{", "not JSON"),
        (b"[]", "JSON object"),
        (b'{"schema_version": 99, "record": "Receipt"}', "schema_version 99"),
        (b'{"schema_version": 1, "record": "Plan"}', "this is a Plan"),
        (b" " * 200_000, "a receipt has a few thousand bytes"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(RecordError, match=why):
        read_receipt(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"measured": peaks(130, 120)}, "allocated .* is more than reserved"),
        ({"predicted": peaks(100, 120, 101 * MIB)}, "requested .* is more than allocated"),
        ({"measured": peaks(20_000, 20_000)}, r"is more than the 14\.56 GiB of the GPU"),
        ({"measured": peaks(0, 0)}, "is not above 0"),
        ({"context_bytes": -1}, "a context of"),
        ({"num_retries": -1}, "below 0"),
        ({"date": "2026-02-30"}, "is not a day"),
        ({"settings": {"batch": "many"}}, "settings: "),
        ({"settings": {"colour": "red"}}, "unknown keyword"),
        ({"model": ""}, "is not a text"),
        ({"measured": replace(peaks(100, 120), step_time_s=float("nan"))}, "a step of nan s"),
        ({"measured": replace(peaks(100, 120), step_time_s=float("inf"))}, "a step of inf s"),
        ({"model": "/home/anna/secret-model"}, "such as those of a path"),
        ({"gpu": "anna@host"}, "such as those of a path"),
        ({"settings": {"freeze": ("C:\\models",)}}, "such as those of a path"),
    ],
)
def test_what_cannot_be_or_is_private_is_refused_even_with_a_good_digest(changes: dict[str, Any], why: str) -> None:
    text = "; ".join(problems_of(receipt(**changes)))
    assert "digest" not in text
    assert re.search(why, text), text


def test_nothing_private_is_written(tmp_path: Path) -> None:
    with pytest.raises(VramfitError, match="no receipt is written"):
        write_receipt(receipt(model="/home/anna/model"), tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


JOBS = [receipt(settings={"batch": batch}) for batch in (1, 2, 4)]


@pytest.mark.parametrize(
    ("receipts", "count"),
    [
        (JOBS, 3),
        (JOBS[:2], 0),
        ([JOBS[0]] * 5, 0),  # one job, five times
        ([replace(r, is_emulated=True) for r in JOBS], 0),
        ([replace(r, kind="train") for r in JOBS], 0),  # runs have bounds, not figures
        ([*JOBS, receipt(measured=peaks(103, 120))], 0),  # 2.9 % too low
        ([*JOBS, receipt(predicted=peaks(103, 123))], 0),  # too high by more than one percent
        ([*JOBS, receipt(ran_out=True)], 0),
        ([*JOBS, receipt(kind="train", measured=peaks(110, 125))], 0),  # above the promise
        ([*JOBS, receipt(kind="train", measured=peaks(110, 124))], 3),
    ],
)
def test_a_card_counts_as_measured_by_three_jobs_and_none_against(receipts: list[Receipt], count: int) -> None:
    assert measured_pairs(receipts) == ({((2, 11), (7, 5)): count} if count else {})


def test_a_little_below_is_placement_and_more_is_too_low() -> None:
    assert not receipt(measured=peaks(101, 122)).is_too_low  # within 2 MiB
    assert receipt(measured=peaks(103, 122)).is_too_low
