"""Labels: names, order, and what they may not be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.errors import WorkloadError
from vramfit.runtime.data.bad_rows import BadValue
from vramfit.runtime.data.labels import LabelNames, in_order, label_text


@given(st.sets(st.integers(-1000, 1000)))
def test_numbers_are_in_order_of_value(values: set[int]) -> None:
    assert [int(name) for name in in_order(str(v) for v in values)] == sorted(values)


@pytest.mark.parametrize("value", [None, "", "  ", [], {}, float("nan"), 0.5])
def test_what_is_no_label(value: object) -> None:
    with pytest.raises(BadValue):
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
