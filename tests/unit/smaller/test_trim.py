"""Vocabularies trimmed to a corpus: the same tokens and the same answers on its rows, with plain transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.unit.smaller.tokenizers_made import ENGLISH, KINDS, OTHERS, write_corpus, write_multilingual
from transformers import AutoConfig, AutoModel, AutoTokenizer

from vramfit.errors import CheckpointError, DataError, VramfitError
from vramfit.smaller.source import Reduction, Source
from vramfit.smaller.trim import TrimReport, trim
from vramfit.smaller.vocabulary import Vocabulary


def run(folder: Path, output: Path, *data: Path, **more: Any) -> TrimReport:
    source = Source(model=str(folder), task=more.pop("task", None))
    return trim(Reduction(source=source, data=tuple(map(str, data)), output=output, **more))


@torch.no_grad()
def theirs(folder: Path, texts: list[str]) -> tuple[list[list[str]], torch.Tensor]:
    """Tokens and the first output of plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    name = AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, name).from_pretrained(folder).eval()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    tokens = [tokenizer.convert_ids_to_tokens(row) for row in batch["input_ids"]]
    return tokens, model(**batch)[0] * _mask(batch, model(**batch)[0])


def _mask(batch: Any, output: torch.Tensor) -> torch.Tensor:
    return batch["attention_mask"][:, :, None] if output.dim() == 3 else torch.ones(())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_corpus_have_the_same_tokens_and_answers_in_transformers(kind: str, tmp_path: Path) -> None:
    folder = write_multilingual(tmp_path / "whole", kind)
    report = run(folder, tmp_path / "trimmed", write_corpus(tmp_path / "english.txt"))
    tokens, output = theirs(folder, ENGLISH)
    new_tokens, new_output = theirs(tmp_path / "trimmed", ENGLISH)
    assert new_tokens == tokens
    assert report.after.vocabulary < report.before.vocabulary
    kept = len(AutoTokenizer.from_pretrained(tmp_path / "trimmed"))
    assert report.after.vocabulary == kept == AutoConfig.from_pretrained(tmp_path / "trimmed").vocab_size
    if output.shape[-1] == report.before.vocabulary:  # a logit for every token
        old, new = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path / "trimmed")
        output = output[..., old.convert_tokens_to_ids(new.convert_ids_to_tokens(list(range(kept))))]
    torch.testing.assert_close(new_output, output, atol=1e-5, rtol=0)
    assert report.max_difference <= 1e-5
    assert report.after.file_bytes < report.before.file_bytes
    assert report.after.serving_bytes is not None
    assert report.before.serving_bytes is not None
    assert report.after.serving_bytes <= report.before.serving_bytes


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level bpe", "unigram"])
def test_special_tokens_bytes_and_characters_stay(kind: str, tmp_path: Path) -> None:
    run(
        write_multilingual(tmp_path / "whole", kind),
        tmp_path / "trimmed",
        write_corpus(tmp_path / "english.txt"),
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "trimmed")
    config = AutoConfig.from_pretrained(tmp_path / "trimmed")
    whole = AutoTokenizer.from_pretrained(tmp_path / "whole")
    assert tokenizer.all_special_tokens == whole.all_special_tokens
    assert config.pad_token_id == tokenizer.pad_token_id
    assert config.bos_token_id == tokenizer.cls_token_id
    unseen = "thin hens near northern windows"
    assert whole.unk_token_id not in whole(unseen)["input_ids"]
    assert tokenizer.unk_token_id not in tokenizer(unseen)["input_ids"]
    if kind == "byte-level bpe":
        assert tokenizer.decode(tokenizer(OTHERS[4])["input_ids"], skip_special_tokens=True) == OTHERS[4]


def test_a_head_that_predicts_words_and_the_embedding_stay_tied(tmp_path: Path) -> None:
    folder = write_multilingual(tmp_path / "whole", "wordpiece masked-lm")
    run(folder, tmp_path / "trimmed", write_corpus(tmp_path / "english.txt"))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "trimmed"))
    assert after.keys() == before.keys()
    assert sum(p.numel() for p in after.values()) < sum(p.numel() for p in before.values())


def test_a_model_saved_in_bf16_stays_so(tmp_path: Path) -> None:
    folder = write_multilingual(tmp_path / "whole", "wordpiece")
    AutoModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    run(folder, tmp_path / "trimmed", write_corpus(tmp_path / "english.txt"))
    tensors = load_file(tmp_path / "trimmed" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_a_row_that_is_segmented_otherwise_brings_its_tokens_back(tmp_path: Path) -> None:
    """`zq☃` is unknown, because nothing goes on at ☃; without `zq` it would be `z` and `q☃`."""
    folder = write_multilingual(tmp_path / "whole", "wordpiece", "zq", "##q☃")
    corpus = tmp_path / "odd.txt"
    corpus.write_text("the zq☃\nthe aq☃\n", encoding="utf-8")
    before = theirs(folder, ["the zq☃"])[0]
    assert before == [["[CLS]", "the", "[UNK]", "[SEP]"]]
    assert theirs(folder, ["the aq☃"])[0] == [["[CLS]", "the", "a", "##q☃", "[SEP]"]]
    run(folder, tmp_path / "trimmed", corpus)
    assert theirs(tmp_path / "trimmed", ["the zq☃"])[0] == before


def test_what_cannot_be_trimmed_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    folder = write_multilingual(tmp_path / "whole", "wordpiece")
    corpus = write_corpus(tmp_path / "english.txt")
    output = tmp_path / "trimmed"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(VramfitError, match="is there already"):
        run(folder, output, corpus)
    with pytest.raises(VramfitError, match="there is no folder"):
        run(folder, tmp_path / "no" / "such", corpus)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        run(tmp_path, tmp_path / "new", corpus)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(DataError, match="no row"):
        run(folder, tmp_path / "new", empty)
    with pytest.raises(DataError, match="standard input"):
        run(folder, tmp_path / "new", Path("-"))
    with pytest.raises(CheckpointError, match="type Other"):
        Vocabulary({"model": {"type": "Other"}})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.txt", "english.txt", "trimmed", "whole"]


def test_an_empty_output_folder_is_filled(tmp_path: Path) -> None:
    folder = write_multilingual(tmp_path / "whole", "wordpiece")
    (tmp_path / "trimmed").mkdir()
    run(folder, tmp_path / "trimmed", write_corpus(tmp_path / "english.txt"))
    assert (tmp_path / "trimmed" / "model.safetensors").stat().st_mode & 0o044
