"""Labels that are numbers, or several a row, are known for that and said; whatever may be a class stays one."""

import json
from typing import Any

import pytest

from vramfit.errors import DataError
from vramfit.tasks.parts.heads import MULTI_LABEL, PROBLEMS, REGRESSION, SINGLE

STARS = [f"{n / 8:g}" for n in range(1, 41)]


def csv(labels: list[str], other: str = "") -> str:
    rows = "".join(f'good film {n},"{label}"{other and ",x"}\n' for n, label in enumerate(labels))
    return f"text,label{other and ',' + other}\n{rows}"


def json_lines(labels: list[Any]) -> str:
    return "\n".join(json.dumps({"text": "good film", "label": label}) for label in labels)


@pytest.mark.parametrize(
    ("name", "content", "problem", "said"),
    [
        ("a.csv", csv(STARS), REGRESSION, "40 different ones in 40 rows between 0.125 and 5: they are predicted"),
        ("a.csv", csv(["3,75", "2,5", "1,25"]), REGRESSION, "3 different ones in 3 rows between 1.25 and 3.75"),
        ("a.jsonl", json_lines([n / 8 for n in range(1, 41)]), REGRESSION, "40 different ones"),
        ("a.jsonl", json_lines([[0.5, 1.5], [2, 2.5]]), REGRESSION, "2 a row (label_1, label_2), 4 different"),
        ("a.jsonl", json_lines([[5, 3], [4, 4]]), REGRESSION, "2 a row (label_1, label_2), 3 different"),
        ("a.csv", csv(["[0.5, 1]", "[1, 2]"]), REGRESSION, "2 a row (label_1, label_2), 3 different"),
        ("a.csv", csv(["toxic", "toxic|insult", ""]), MULTI_LABEL, "1 of 3 rows has several labels: each label is"),
        ("a.csv", csv(["toxic", "insult", "toxic, insult"]), MULTI_LABEL, "1 of 3 rows has several"),
        ("a.csv", csv(["1", "2", "1;2", "2;1"]), MULTI_LABEL, "2 of 4 rows have several"),
        ("a.csv", csv(["['toxic', 'insult']", "[]"]), MULTI_LABEL, "1 of 2 rows has several"),
        ("a.csv", csv(['[""toxic"", ""insult""]', "[]"]), MULTI_LABEL, "1 of 2 rows has several"),
        ("a.jsonl", json_lines(["toxic", ["toxic", "insult"]]), MULTI_LABEL, "1 of 2 rows has several"),
        ("a.jsonl", json_lines([["toxic"], []]), MULTI_LABEL, "0 of 2 rows have several"),
        ("a.jsonl", json_lines([[0, 2], [1, 2]]), MULTI_LABEL, "2 of 2 rows have several"),
        ("a.jsonl", json_lines([[0, 1, 0], [1, 1, 0]]), MULTI_LABEL, "1 of 2 rows has several"),
        ("a.jsonl", json_lines([[0.0, 1.0], [1.0, 0.0]]), MULTI_LABEL, "0 of 2 rows have several"),
    ],
)
def test_what_labels_are_is_decided_and_said(
    write: Any, read: Any, name: str, content: str, problem: str, said: str
) -> None:
    samples = read(write(name, content))
    assert samples.problem == problem
    assert said in samples.notes[0]
    assert "--problem says otherwise" in samples.notes[0]


@pytest.mark.parametrize(
    ("content", "names", "labels"),
    [
        (json_lines([["b", "a"], "c", []]), ("a", "b", "c"), [[1, 1, 0], [0, 0, 1], [0, 0, 0]]),
        (json_lines([[0, 1, 0], [1, 1, 0]]), ("0", "1", "2"), [[0, 1, 0], [1, 1, 0]]),
        (json_lines([["a", "a"]]), ("a",), [[1]]),
        (json_lines([[3, 4.5], [2, 1]]), ("label_1", "label_2"), [[3, 4.5], [2, 1]]),
        (json_lines([0.25, 3, 2.5, 1.75]), ("label",), [[0.25], [3], [2.5], [1.75]]),
    ],
)
def test_a_batch_has_a_row_of_fractions_for_each_sample(
    write: Any, read: Any, content: str, names: tuple[str, ...], labels: list[list[float]]
) -> None:
    samples = read(write("a.jsonl", content))
    assert samples.label_names == names
    made = samples.collate(range(len(labels)))["labels"]
    assert made.is_floating_point()
    assert made.tolist() == labels


def test_one_mark_separates_all_rows(write: Any, read: Any) -> None:
    rows = csv(["Food, Drinks|Travel", "Travel", "Food, Drinks"])
    assert read(write("a.csv", rows)).label_names == ("Food, Drinks", "Travel")
    asked = read(write("a.csv", csv(["a,b", "c,b"])), problem=MULTI_LABEL)
    assert asked.label_names == ("a", "b", "c")
    assert asked.notes == ()


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (csv([*STARS, "unknown"]), {}, "row 42: label is 'unknown', not a finite number"),
        (csv([*STARS, "inf"]), {}, "row 42: label is 'inf', not a finite number"),
        (csv([*STARS, "1e400"]), {}, "row 42: label is '1e400', not a finite number"),
        (csv([*STARS, ""]), {}, "row 42: label is missing"),
        (csv(["1", "good"]), {"problem": REGRESSION}, "row 3: label is 'good', not a finite number"),
        (csv(["[0.5, 1]", "[0.5, 1, 2]"]), {"problem": REGRESSION}, "row 3: label has 3 numbers, and 2 (label_1, "),
        (csv(["a|b", "a|c|d"]), {"problem": MULTI_LABEL, "label_names": ["a", "b"]}, "row 3: the label 'c' is not one"),
        (csv(["a|b", "nan"]), {}, "row 3: the label is missing"),
    ],
)
def test_rows_that_are_not_of_the_kind_are_named(
    write: Any, read: Any, content: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(write("a.csv", content), **options)
    assert said in str(caught.value)
    kept = read(write("a.csv", content), **options, skip_bad_rows=True)
    assert len(kept.bad_rows) == 1


def test_several_columns_hold_numbers_or_marks(write: Any, read: Any) -> None:
    path = write("a.csv", "text,calm,glad,odd\ngood film,0.5,2,0\nbad film,1.5,3,1\n")
    values = read(path, label_column="calm, glad")
    assert (values.problem, values.label_names) == (REGRESSION, ("calm", "glad"))
    assert values.collate([0, 1])["labels"].tolist() == [[0.5, 2], [1.5, 3]]
    again = read(path, label_names=["calm", "glad"], problem=REGRESSION)  # a model's: found by their names
    assert again.collate([1])["labels"].tolist() == [[1.5, 3]]
    swapped = read(path, label_names=["calm", "glad"], problem=REGRESSION, label_column="glad,calm")
    assert swapped.collate([1])["labels"].tolist() == [[1.5, 3]]
    marks = write("b.csv", "text,toxic,rude\ngood film,0,0\nbad film,1,1\n")
    labels = read(marks, label_column="toxic,rude")
    assert (labels.problem, labels.label_names) == (MULTI_LABEL, ("toxic", "rude"))
    assert labels.collate([0, 1])["labels"].tolist() == [[0, 0], [1, 1]]
    known = read(marks, label_names=["rude", "toxic"], problem=MULTI_LABEL, label_column="toxic,rude")
    assert known.label_names == ("rude", "toxic")
    with pytest.raises(DataError, match="row 3: the label 'toxic' is not one of the 2 known"):
        read(marks, label_names=["rude", "odd"], problem=MULTI_LABEL, label_column="toxic,rude")
    with pytest.raises(DataError, match=r"row 3: calm is 1.5, neither 0 nor 1"):
        read(path, label_column="odd,calm", problem=MULTI_LABEL)
    with pytest.raises(DataError, match="no column 'calm,sad'"):
        read(path, label_column="calm,sad")


def test_what_is_learned_can_be_asked_for(write: Any, read: Any) -> None:
    stars = write("a.csv", csv(["1", "2", "1", "2"]))
    assert read(stars).problem == SINGLE
    assert read(stars, problem=REGRESSION).collate([0, 1])["labels"].tolist() == [[1], [2]]
    assert read(stars, problem=MULTI_LABEL).collate([0, 1])["labels"].tolist() == [[1, 0], [0, 1]]
    assert len(read(write("b.csv", csv(STARS)), problem=SINGLE).label_names) == len(STARS)
    assert read(write("c.csv", csv(["a|b", "a"])), problem=SINGLE).label_names == ("a", "a|b")


def test_the_same_rows_learned_otherwise_are_other_data(write: Any, read: Any) -> None:
    path = write("a.csv", csv(["1", "2"]))
    assert len({read(path, problem=problem).fingerprint for problem in PROBLEMS}) == len(PROBLEMS)
    assert read(path).fingerprint == read(path, problem=SINGLE).fingerprint


def test_a_few_decimals_stay_classes_and_the_way_to_numbers_is_said(write: Any, read: Any) -> None:
    samples = read(write("a.csv", csv(["0.5", "1.0", "1.5"] * 2)))
    assert samples.problem == SINGLE
    assert "--problem regression" in samples.notes[0]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("labels", [STARS, ["good", "bad", "good|bad"], ["good", "good, bad"]])
def test_evaluation_of_classes_refuses_them(write: Any, read: Any, labels: list[str], skip: bool) -> None:
    with pytest.raises(DataError, match="the model gives each row one class") as caught:
        read(write("a.csv", csv(labels)), label_names=["good", "bad"], skip_bad_rows=skip)
    assert caught.value.hint == "give data with the labels that are known: good, bad"


def test_evaluation_splits_at_the_mark_that_gives_known_labels(write: Any, read: Any) -> None:
    path = write("a.csv", csv(["Food, Drinks;Travel", "Travel|Food, Drinks", "1", "Travel"]))
    samples = read(path, label_names=["Food, Drinks", "Travel"], problem=MULTI_LABEL)
    assert samples.collate(range(4))["labels"].tolist() == [[1, 1], [1, 1], [0, 1], [0, 1]]


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
