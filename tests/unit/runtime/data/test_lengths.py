"""Lengths of a data set for a plan: the same rows and the same columns as training reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from vramfit.errors import VramfitError
from vramfit.models.hub import NotOnHubError
from vramfit.planner.request import Lengths
from vramfit.runtime.data import samples as samples_module
from vramfit.runtime.data.samples import lengths_of_data, load_counter

JOB: dict[str, Any] = {"task": "sequence-classification", "max_length": 8}
WORDS = ("a", "few", "words", "of", "text", "to", "count")


def count(path: Path, **keywords: Any) -> Lengths:
    counter = load_counter(keywords.pop("tokenizer"))
    return lengths_of_data(str(path), counter=counter, **(JOB | keywords))()


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A tokenizer of whole words, with [CLS] and [SEP]."""
    from transformers import BertTokenizerFast

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(names) + "\n")
    made = BertTokenizerFast(vocab={name: i for i, name in enumerate(names)})
    made.save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_tokens_of_texts_are_counted_with_special_ones(tmp_path: Path, tokenizer: str, ending: str) -> None:
    texts = ["a few words", "a", "text to count of words"]
    file = tmp_path / f"train.{ending}"
    if ending == "jsonl":
        file.write_text("\n".join(json.dumps({"text": t, "label": 0}) for t in texts))
    else:
        separator = "," if ending == "csv" else "\t"
        file.write_text("\n".join([f"text{separator}label", *(f"{t}{separator}0" for t in texts)]))
    assert count(file, tokenizer=tokenizer).values == (5, 3, 7)
    with pytest.raises(VramfitError, match=r"no column 'body'; it has text, label"):
        count(file, text_columns=("body",), tokenizer=tokenizer)


def test_a_tokenizer_that_cannot_be_fetched_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(hub_id: str) -> bytes:
        raise NotOnHubError("the hub could not be reached: ConnectError")

    monkeypatch.setattr("vramfit.models.tokenizers.fetch_config", unreachable)
    (tmp_path / "d.csv").write_text("text\na few words\n")
    with pytest.raises(VramfitError, match="the hub could not be reached") as caught:
        count(tmp_path / "d.csv", tokenizer="nobody/nothing")
    assert "--tokenizer" in (caught.value.hint or "")


def test_columns_are_those_that_training_reads(tmp_path: Path, tokenizer: str) -> None:
    file = tmp_path / "train.tsv"
    file.write_text("index\tsentence1\tsentence2\tlabel\n0\ta few\twords of text\tno\n1\t\t\tno\n")
    assert count(file, tokenizer=tokenizer).values == (8,)  # without the bad row
    tagged = tmp_path / "train.conll"
    tagged.write_text("a O\nfew O\n\nwords B-x\nof O\ntext O\n")
    assert count(tagged, task="token-classification", tokenizer=tokenizer).values == (4, 5)


def test_texts_are_counted_whole_and_questions_in_windows(tmp_path: Path, tokenizer: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "a few", "context": "words of text to count " * 4}))
    assert count(file, tokenizer=tokenizer, text_columns=("context",)).values == (22,)
    windows = count(file, task="question-answering", tokenizer=tokenizer).values
    assert len(windows) > 4
    assert max(windows) == 8


def test_pairs_are_counted_together(tmp_path: Path, tokenizer: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"question": "a few", "context": "words of text"}))
    assert count(file, text_columns=("question", "context"), tokenizer=tokenizer).values == (8,)


def test_where_not_all_rows_were_seen_the_longest_is_expected(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "MAX_ROWS", 4)
    file = tmp_path / "train.csv"
    file.write_text("text\n" + "a few words\n" * 9)
    found = count(file, tokenizer=tokenizer)
    assert not found.complete
    assert "the first 4 rows" in found.source
    assert found.cut(128).longest == 128


@pytest.mark.parametrize("name", ["none.csv", "train.parquet"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, tokenizer: str, name: str) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(VramfitError):
        count(tmp_path / name, tokenizer=tokenizer)


def test_texts_that_have_a_vector_each_are_counted_one_by_one(tmp_path: Path, tokenizer: str) -> None:
    file = tmp_path / "train.csv"
    file.write_text("anchor,positive,negative\na few words,a,text to\na,of text,count\n")
    found = count(file, task="embedding", tokenizer=tokenizer)
    assert found.values == (5, 3, 4, 3, 4, 3)
