"""Rows of several texts: what they are read as, what is wrong with them, and the batches that are made of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.training.small_runs import BAD, GOOD, write_model

from vramfit.errors import DataError, WorkloadError
from vramfit.models.tokenizers import load_tokenizer
from vramfit.runtime.data.examples import Examples, check_learnable, read_examples
from vramfit.runtime.data.order import BatchOrder
from vramfit.runtime.data.samples import Samples, read_samples
from vramfit.runtime.data.source import DataSource
from vramfit.tasks import find_task
from vramfit.tasks.parts.reading import Tokenizing

TASK = "embedding"


def write(folder: Path, rows: list[dict[str, Any]], name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def examples(folder: Path, rows: list[dict[str, Any]], **more: Any) -> Examples:
    return read_examples(DataSource(path=write(folder, rows), task=TASK, **more))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model")))


def samples(folder: Path, rows: list[dict[str, Any]], tokenizer: Any, **more: Any) -> Samples:
    how = Tokenizing(tokenizer=tokenizer, max_length=16)
    return read_samples(DataSource(path=write(folder, rows), task=TASK, **more), how)


@pytest.mark.parametrize(
    ("row", "loss", "read_as", "texts"),
    [
        ({"anchor": "a", "positive": "b"}, None, "pairs", 2),
        ({"Query": "a", "Positive": "b", "id": 3}, None, "pairs", 2),
        ({"question": "a", "answer": "b"}, "in-batch-symmetric", "pairs", 2),
        ({"title": "a", "body": "b"}, None, "pairs", 2),
        ({"sentence1": "a", "sentence2": "b", "score": 0.5}, None, "scored pairs", 2),
        ({"sentence1": "a", "sentence2": "b", "label": "3.2"}, "angle", "scored pairs", 2),
        ({"sentence1": "a", "sentence2": "b", "label": 1}, "contrastive", "pairs marked 0 or 1", 2),
        ({"premise": "a", "hypothesis": "b", "score": 1}, "in-batch", "pairs", 2),
        ({"anchor": "a", "positive": "b", "negative": "c"}, None, "pairs with negatives", 3),
        ({"anchor": "a", "positive": "b", "negative": "c"}, "triplet", "pairs with negatives", 3),
        ({"query": "a", "positive": "b", "negative_2": "d", "negative_1": "c"}, None, "pairs with negatives", 4),
        ({"query": "a", "pos": ["b"], "neg": ["c", "d", "e"]}, None, "pairs with negatives", 5),
        ({"query": "a", "positive": "b", "negatives": ["c", "d"], "margin": [1, 2.5]}, "margin-mse", "margins", 4),
        ({"query": "a", "positive": "b", "negative": "c", "label": "-0.5"}, "margin-mse", "margins", 3),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_what_rows_are_follows_from_their_columns_and_the_loss(
    tmp_path: Path, row: dict[str, Any], loss: str | None, read_as: str, texts: int
) -> None:
    found = examples(tmp_path, [row, row], loss=loss)
    assert f"{read_as} (" in found.notes[0]
    assert "--text-column" in found.notes[0]
    assert found.references[0]["texts"] == ("a", "b", "c", "d", "e")[:texts]
    encoded = [reference | {"num_texts": texts} for reference in found.references]
    settings = find_task(TASK).data_settings(encoded, loss)
    assert settings == {"texts": texts, "loss": loss or ("cosent" if "score" in row else "in-batch")}


def test_columns_can_be_named_one_by_one(tmp_path: Path) -> None:
    rows = [{"x": "a", "y": "b", "z": "c", "w": 2.5}] * 2
    named = examples(tmp_path, rows, text_columns=("z", "x"), label_column="w")
    assert named.references[0]["texts"] == ("c", "a")
    assert named.references[0]["scores"] == (2.5,)
    three = examples(tmp_path, rows, text_columns=("y", "z", "x"))
    assert three.references[0]["texts"] == ("b", "c", "a")


def test_a_column_of_scores_that_is_not_read_is_said(tmp_path: Path) -> None:
    found = examples(tmp_path, [{"sentence1": "a", "sentence2": "b", "score": 0.5}] * 2, loss="in-batch")
    assert "score is not read" in found.notes[0]


@pytest.mark.parametrize(
    ("bad", "loss", "what"),
    [
        ({"anchor": "a"}, None, "row 3: no positive"),
        ({"anchor": "a", "positive": " "}, None, "row 3: positive is empty"),
        ({"anchor": "a", "positive": None}, None, "row 3: positive is empty"),
        ({"anchor": "a", "positive": {"x": 1}}, None, "row 3: positive is {'x': 1}, not a text"),
    ],
)
def test_a_pair_without_a_partner_is_named_with_file_and_row(
    tmp_path: Path, bad: dict[str, Any], loss: str | None, what: str
) -> None:
    good = {"anchor": "a", "positive": "b"}
    with pytest.raises(DataError, match=r"data\.jsonl: 1 of 4 rows cannot be used") as info:
        examples(tmp_path, [good, good, bad, good], loss=loss)
    assert what in str(info.value)
    assert info.value.rows == (3,)
    kept = examples(tmp_path, [good, good, bad, good], loss=loss, skip_bad_rows=True)
    assert [reference["index"] for reference in kept.references] == [0, 1, 3]


@pytest.mark.parametrize(
    ("value", "loss", "what"),
    [
        ("high", None, "score is high, not a finite number"),
        (float("nan"), "cosent", "not a finite number"),
        (float("inf"), None, "not a finite number"),
        (True, None, "not a finite number"),
        (None, None, "no score"),
        ("", None, "no score"),
        (0.5, "contrastive", "score is 0.5, neither 0 (apart) nor 1 (together)"),
        (2, "contrastive", "score is 2, neither"),
        ([1, 2], None, "score has 2 numbers, and 1 are wanted"),
        ("[1, x]", None, "not a list of numbers"),
    ],
)
def test_a_score_that_is_none_is_named(tmp_path: Path, value: Any, loss: str | None, what: str) -> None:
    rows = [{"sentence1": "a", "sentence2": "b", "score": s} for s in (1, value, 0)]
    with pytest.raises(DataError) as info:
        examples(tmp_path, rows, loss=loss)
    assert what in str(info.value).replace("'", "")
    assert info.value.rows == (2,)


def test_classes_of_pairs_are_no_scores_and_what_to_do_is_said(tmp_path: Path) -> None:
    rows = [{"premise": "a", "hypothesis": "b", "label": label} for label in ("entailment", "neutral")]
    with pytest.raises(DataError, match="label is 'entailment', not a finite number") as info:
        examples(tmp_path, rows)
    assert "--loss in-batch" in str(info.value.hint)
    pairs = [{"text1": "a", "text2": "b", "label": label} for label in (True, False)]
    marked = examples(tmp_path, pairs, loss="contrastive")
    assert [reference["scores"] for reference in marked.references] == [(1,), (0,)]


def test_another_number_of_negatives_or_margins_is_named(tmp_path: Path) -> None:
    rows = [{"query": "a", "positive": "b", "negatives": n, "margin": [1.0, 2.0]} for n in (["c", "d"], ["e"])]
    with pytest.raises(DataError, match="row 2: 1 negative, and the first row has 2"):
        examples(tmp_path, rows)
    rows[1] |= {"negatives": ["e", "f"], "margin": [1.0]}
    with pytest.raises(DataError, match="row 2: margin has 1 number, and 2 are wanted"):
        examples(tmp_path, rows, loss="margin-mse")
    rows[1] |= {"negatives": ["e", ""]}
    with pytest.raises(DataError, match=r"row 2: negatives has .* in it, not a text"):
        examples(tmp_path, rows)
    with pytest.raises(DataError, match="row 1: positive has 2 texts, not one"):
        examples(tmp_path, [{"query": "a", "positive": ["b", "c"]}])


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"anchor": "a", "positive": "a"}] * 3, "every anchor has the same positive, so that no negatives remain"),
        ([{"anchor": a, "positive": "b"} for a in "xyz"], "every anchor has the same positive"),
        ([{"anchor": a, "positive": a, "positive_id": 7} for a in "xyz"], "every anchor has the same positive"),
        ([{"anchor": "a", "positive": p} for p in "xy"], None),
        ([{"anchor": "a", "positive": "b", "negative": n} for n in "cc"], None),
        ([{"sentence1": "a", "sentence2": "a", "score": s} for s in (0.1, 0.9)], "all texts are the same"),
        ([{"sentence1": "a", "sentence2": "b", "score": s} for s in (0.1, 0.9)], None),
    ],
)
def test_texts_that_leave_nothing_to_compare_are_refused(tmp_path: Path, rows: list[Any], problem: str | None) -> None:
    source = DataSource(path=write(tmp_path, rows), task=TASK)
    if problem is None:
        check_learnable(source, read_examples(source))
    else:
        with pytest.raises(DataError, match=problem):
            check_learnable(source, read_examples(source))


def test_a_class_with_one_member_is_named_and_may_be_left_out(tmp_path: Path) -> None:
    rows = [{"text": t, "label": c} for t, c in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "z"))]
    with pytest.raises(DataError, match="row 2: no other row has the class 'y'") as info:
        examples(tmp_path, rows)
    assert info.value.rows == (2,)
    kept = examples(tmp_path, rows, skip_bad_rows=True)
    assert [(r["texts"], r["group"]) for r in kept.references] == [
        (("a",), "x"),
        (("c",), "x"),
        (("d",), "z"),
        (("e",), "z"),
    ]
    with pytest.raises(DataError, match="every row has the class 'x'"):
        examples(tmp_path, [rows[0], rows[2]])


@pytest.mark.parametrize(
    ("row", "more", "what"),
    [
        ({"anchor": "a", "positive": "b"}, {"loss": "triplet"}, "loss triplet learns from pairs with negatives"),
        ({"anchor": "a", "positive": "b"}, {"loss": "cosent"}, "no column looks like a score for each pair"),
        ({"query": "a", "positive": "b", "negative": "c"}, {"loss": "margin-mse"}, "a margin for each negative"),
        ({"query": "a", "positive": "b", "negative": "c"}, {"loss": "angle"}, "loss angle learns from scored pairs"),
        ({"text": "a", "label": "x"}, {"loss": "triplet"}, "and these are texts with classes (text)"),
        ({"text": "a"}, {}, "the class of each text"),
        ({"x": "a", "y": "b"}, {}, "none of its columns looks like pairs of texts, or a text and its class: x, y"),
        ({"anchor": "a", "positive": "b"}, {"text_columns": ("anchor", "posit")}, "no column 'posit'"),
    ],
    ids=str,
)
def test_columns_that_do_not_go_with_the_loss_are_refused(
    tmp_path: Path, row: dict[str, Any], more: dict[str, Any], what: str
) -> None:
    with pytest.raises(DataError) as info:
        examples(tmp_path, [row, row], **more)
    assert what in str(info.value)
    assert info.value.hint


def test_too_many_columns_are_refused() -> None:
    with pytest.raises(WorkloadError, match="reads 1 to 100 columns of text, not 101"):
        DataSource(path="x.csv", task=TASK, text_columns=tuple(map(str, range(101))))


def test_a_batch_has_a_row_for_each_text_sample_by_sample(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"query": "the film", "positive": "great", "negatives": ["dull", "awful film"], "margin": [1.5, -2]},
        {"query": "music", "positive": "the film", "negatives": ["dull", "cold"], "margin": [0, 3]},
    ]
    found = samples(tmp_path, rows, tokenizer, loss="margin-mse")
    assert (len(found), found.num_samples, found.texts_per_sample) == (8, 2, 4)
    assert list(found.sample_lengths) == [4 + 3 + 3 + 4, 3 + 4 + 3 + 3]
    batch = found.collate_samples([1, 0])
    said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["input_ids"]]
    assert said == ["music", "the film", "dull", "cold", "the film", "great", "dull", "awful film"]
    assert batch["text_rows"].tolist() == list(range(8))
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [[0, 3]] * 4 + [[1.5, -2]] * 4
    ids = batch["text_ids"].tolist()
    assert batch["text_ids"].dtype == torch.int64
    assert ids[1] == ids[4]
    assert ids[2] == ids[6]
    assert len(set(ids)) == 6
    assert "labels" not in found.collate([0, 1])  # texts by themselves, as they are evaluated


def test_scores_are_a_number_for_each_text(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"sentence1": "film", "sentence2": "music", "score": s} for s in (0.25, 4)]
    batch = samples(tmp_path, rows, tokenizer).collate_samples([0, 1])
    assert batch["labels"].tolist() == [0.25, 0.25, 4, 4]


def test_texts_with_equal_ids_are_marked_as_equal(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"query": "film", "query_id": 1, "positive": "great", "positive_id": "p1"},
        {"query": "music", "query_id": 2, "positive": "lovely", "positive_id": "p1"},
        {"query": "paris", "query_id": 3, "positive": "warm", "positive_id": "1"},
    ]
    ids = samples(tmp_path, rows, tokenizer).collate_samples([0, 1, 2])["text_ids"].tolist()
    assert ids[1] == ids[3]
    assert len(set(ids)) == 5  # a query and a document of one id are two things


def test_texts_of_a_class_meet_another_one_in_every_epoch(tmp_path: Path, tokenizer: Any) -> None:
    words = [(word, "good") for word in GOOD] + [(word, "bad") for word in BAD]
    found = samples(tmp_path, [{"text": t, "label": c} for t, c in words], tokenizer)
    assert (found.num_samples, found.texts_per_sample) == (12, 2)
    assert found.sample_ids is None
    everything = list(range(12))
    seen = []
    for epoch in (0, 1):
        batch = found.collate_samples(everything, epoch=epoch, seed=3)
        said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["input_ids"]]
        own, partners = said[0::2], said[1::2]
        assert own == [word for word, _ in words]
        assert all(one != other for one, other in zip(own, partners, strict=True))
        assert sorted(partners) == sorted(own)
        kinds = dict(words)
        assert [kinds[word] for word in own] == [kinds[word] for word in partners]
        ids = batch["text_ids"].reshape(-1, 2)
        assert torch.equal(ids[:, 0], ids[:, 1])
        assert len(ids.unique()) == 2
        again = found.collate_samples(everything, epoch=epoch, seed=3)
        assert torch.equal(again["input_ids"], batch["input_ids"])
        seen.append(partners)
    assert seen[0] != seen[1]
    other = found.collate_samples(everything, epoch=0, seed=4)
    assert not torch.equal(other["input_ids"], found.collate_samples(everything, epoch=0, seed=3)["input_ids"])


def test_the_fingerprint_sees_scores_classes_and_how_texts_are_grouped(tmp_path: Path, tokenizer: Any) -> None:
    pair = {"sentence1": "film", "sentence2": "music"}
    prints = {
        samples(tmp_path, rows, tokenizer).fingerprint
        for rows in (
            [pair, pair],
            [pair | {"score": 1}, pair | {"score": 2}],
            [pair | {"score": 1}, pair | {"score": 3}],
            [{"text": t, "label": c} for t, c in (("film", "x"), ("music", "x"), ("film", "y"), ("music", "y"))],
            [{"text": t, "label": c} for t, c in (("film", "x"), ("music", "y"), ("film", "x"), ("music", "y"))],
            [{"query": "film", "positive": "music", "negatives": ["film", "music"]}],
        )
    }
    assert len(prints) == 6


@pytest.mark.parametrize("bucket", [True, False])
def test_a_text_comes_once_in_a_batch_where_that_can_be(bucket: bool) -> None:
    ids = [(n, 1000 + n % 40) for n in range(200)]  # every second text five times
    order = BatchOrder([1 + n % 7 for n in range(200)], 16, seed=1, bucket=bucket)
    order.ids = ids
    for epoch in range(3):
        batches = order.epoch(epoch)
        assert [len(batch) for batch in batches] == [16] * 12 + [8]
        assert sorted(n for batch in batches for n in batch) == list(range(200))
        assert all(len({t for n in batch for t in ids[n]}) == 2 * len(batch) for batch in batches)
        assert order.epoch(epoch) == batches
    assert order.epoch(0) != order.epoch(1)


def test_texts_that_cannot_but_meet_do(tmp_path: Path) -> None:
    order = BatchOrder([1] * 20, 5, seed=0, bucket=False)
    order.ids = [(n, 7) for n in range(20)]
    assert sorted(n for batch in order.epoch(0) for n in batch) == list(range(20))


def test_samples_without_doubles_are_ordered_as_those_of_any_task() -> None:
    plain = BatchOrder([3, 1, 2, 5, 4], 2, seed=0)
    order = BatchOrder([3, 1, 2, 5, 4], 2, seed=0)
    order.ids = [(n, n + 10) for n in range(5)]
    assert order.epoch(0) == plain.epoch(0)


def test_texts_without_labels_are_all_texts_of_a_row(tmp_path: Path, tokenizer: Any) -> None:
    found = samples(tmp_path, [{"text": "film"}, {"text": "music"}], tokenizer, needs_labels=False)
    assert len(found) == 2
    pairs = samples(tmp_path, [{"anchor": "film", "positive": "music"}], tokenizer, needs_labels=False)
    assert len(pairs) == 2
    only = samples(tmp_path, [{"unknown": "film"}], tokenizer, needs_labels=False)
    assert [reference["texts"] for reference in only.references] == [("film",)]
