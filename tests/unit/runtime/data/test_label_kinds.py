"""Labels that are numbers, or several a row, are refused with the reason; whatever may be a class is not."""

import json
from typing import Any

import pytest

from vramfit.errors import DataError

STARS = [f"{n / 8:g}" for n in range(1, 41)]


def csv(labels: list[str], other: str = "") -> str:
    rows = "".join(f'good film {n},"{label}"{other and ",x"}\n' for n, label in enumerate(labels))
    return f"text,label{other and ',' + other}\n{rows}"


def json_lines(labels: list[Any]) -> str:
    return "\n".join(json.dumps({"text": "good film", "label": label}) for label in labels)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", csv(STARS), "35 different decimals in 40 rows: 0.125, 0.25, "),
        ("a.csv", csv([*STARS, "unknown"]), "35 different decimals in 41 rows"),
        ("a.csv", csv(["3,75", "2,5", "1,25"]), "3 different decimals in 3 rows: 3,75, 2,5, 1,25"),
        ("a.jsonl", json_lines([n / 8 for n in range(1, 41)]), "35 different decimals in 40 rows"),
        ("a.csv", csv(["toxic", "toxic|insult", ""]), "1 of 3 rows has them: toxic|insult"),
        ("a.csv", csv(["toxic", "insult", "toxic, insult"]), "1 of 3 rows has them: toxic, insult"),
        ("a.csv", csv(["1", "2", "1;2", "2;1"]), "2 of 4 rows have them: 1;2, 2;1"),
        ("a.csv", csv(["['toxic', 'insult']", "[]"]), "2 of 2 rows have them: ['toxic', 'insult'], []"),
        ("a.jsonl", json_lines(["toxic", ["toxic", "insult"]]), "1 of 2 rows has them: ['toxic', 'insult']"),
        ("a.jsonl", json_lines([[0, 1], [1, 1]]), "2 of 2 rows have them: [0, 1], [1, 1]"),
    ],
)
def test_labels_that_are_not_one_class_a_row_are_refused(
    write: Any, read: Any, name: str, content: str, said: str, skip: bool
) -> None:
    with pytest.raises(DataError) as caught:
        read(write(name, content), skip_bad_rows=skip)
    assert said in str(caught.value)
    assert "not supported" in str(caught.value)
    assert "skip" not in str(caught.value.hint)
    assert "--label-column" not in str(caught.value.hint)  # there is no other column


def test_another_column_is_named_where_there_is_one(write: Any, read: Any) -> None:
    with pytest.raises(DataError) as caught:
        read(write("a.csv", csv(STARS, other="stars")))
    assert "--label-column" in str(caught.value.hint)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("labels", [STARS, ["good", "bad", "good|bad"], ["good", "good, bad"]])
def test_evaluation_refuses_them_too(write: Any, read: Any, labels: list[str], skip: bool) -> None:
    with pytest.raises(DataError, match="not supported") as caught:
        read(write("a.csv", csv(labels)), label_names=["good", "bad"], skip_bad_rows=skip)
    assert caught.value.hint == "give data with the labels that are known: good, bad"


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["0", "1", "2", "10"], ("0", "1", "2", "10")),
        (["1.0", "2.0", "5.0"], ("1.0", "2.0", "5.0")),
        (["0.5", "1.0", "1.5"] * 2, ("0.5", "1.0", "1.5")),
        (["3.11", "unknown", "good"], ("3.11", "good", "unknown")),
        (["Food, Drinks", "Food"], ("Food", "Food, Drinks")),
        (["[spam]", "[ham]", "a|", "|"], ("[ham]", "[spam]", "a|", "|")),
        (["v1.2", "1.2.3", "infinity"], ("1.2.3", "infinity", "v1.2")),
    ],
)
def test_names_that_may_be_classes_stay_classes(
    write: Any, read: Any, labels: list[str], names: tuple[str, ...]
) -> None:
    assert read(write("a.csv", csv(labels))).label_names == names


def test_a_model_with_such_names_is_evaluated_as_ever(write: Any, read: Any) -> None:
    names = ["a|b", *STARS]
    assert len(read(write("a.csv", csv(names)), label_names=names)) == len(names)


def test_labels_are_not_looked_at_where_none_are_needed(write: Any, read: Any) -> None:
    assert len(read(write("a.csv", csv(STARS)), needs_labels=False)) == len(STARS)
