"""Labels: names, order, and what they may not be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.errors import WorkloadError
from vramfit.tasks.parts.reading import BadValue, LabelNames, in_order, label_text
from vramfit.tasks.sequence_classification import doubts


@given(st.sets(st.integers(-1000, 1000)))
def test_numbers_are_in_order_of_value(values: set[int]) -> None:
    assert [int(name) for name in in_order(str(v) for v in values)] == sorted(values)


@pytest.mark.parametrize("value", [None, "", "  ", [], {}, float("nan"), "nan", " NaN "])
def test_what_is_no_label(value: object) -> None:
    with pytest.raises(BadValue):
        label_text(value)


@pytest.mark.parametrize("value", [None, "", float("nan"), "nan", "NaN"])
def test_a_label_that_pandas_had_none_for_is_missing(value: object) -> None:
    with pytest.raises(BadValue, match="the label is missing"):
        label_text(value)


def test_a_whole_number_may_come_as_a_float() -> None:
    assert label_text(2.0) == "2"


def test_numbers_that_are_names_are_not_places() -> None:
    names = LabelNames(["1", "2"])
    assert names.name_of(1) == "1"
    with pytest.raises(BadValue, match="'0' is not one of the 2 known"):
        names.name_of(0)


def test_names_that_repeat_are_refused() -> None:
    with pytest.raises(WorkloadError, match="repeat"):
        LabelNames(["a", "a"])


def test_numbers_that_stand_for_names_are_said_with_them() -> None:
    names = LabelNames(["complaint", "praise"])
    assert names.name_of("praise") == "praise"
    assert names.notes == ()
    assert [names.name_of(0), names.name_of("1")] == ["complaint", "praise"]
    assert names.notes == ("labels are numbers: 0 is complaint, 1 is praise",)
    many = LabelNames([f"kind {n}" for n in range(100)])
    many.name_of(99)
    assert many.notes[0].endswith("7 is kind 7, …")


def test_numbers_that_are_names_need_no_words() -> None:
    names = LabelNames(["0", "1"])
    names.name_of(1)
    gathered = LabelNames()
    gathered.name_of(1)
    assert names.notes == gathered.notes == ()


def test_a_few_decimals_and_a_label_for_every_row_are_doubted() -> None:
    (decimals,) = doubts(["0.5", "1.0", "1.5"], 60)
    assert decimals.startswith("3 labels in 60 rows, decimals among them (0.5, 1.5)")
    assert "regression" in decimals
    (many,) = doubts([f"user {n}" for n in range(60)], 80)
    assert many.startswith("60 labels in 80 rows: a class for nearly every row")
    assert "--label-column" in many


@pytest.mark.parametrize(
    ("names", "num_rows"),
    [
        (["a", "b"], 2),
        (["1.0", "2.0", "-1"], 30),
        (["v1.2", "inf", "infinity"], 30),
        ([f"intent {n}" for n in range(150)], 1500),
    ],
)
def test_labels_as_they_are_meant_are_not_doubted(names: list[str], num_rows: int) -> None:
    assert doubts(names, num_rows) == ()
