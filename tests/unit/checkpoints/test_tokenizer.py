"""The tokenizer's files against the word embedding."""

import json
from pathlib import Path
from typing import Any

import pytest

from vramfit.checkpoints.inspection import inspect_checkpoint
from vramfit.checkpoints.tokenizer import read_vocabulary
from vramfit.records.finding import Finding


def tokenizer_findings(folder: Path) -> list[Finding]:
    return [f for f in inspect_checkpoint(folder).findings if f.check.startswith("tokenizer")]


def replace(folder: Path, name: str, content: Any) -> None:
    (folder / "vocab.txt").unlink(missing_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def words(count: int) -> dict[str, int]:
    return {f"w{i}": i for i in range(count)}


@pytest.mark.parametrize(("count", "severity"), [(100, "ok"), (97, "ok"), (60, "ok"), (101, "error")])
def test_every_id_must_be_a_row(folder: Path, count: int, severity: str) -> None:
    replace(folder, "tokenizer.json", {"model": {"type": "WordPiece", "vocab": words(count)}})
    (found,) = tokenizer_findings(folder)
    assert found.severity == severity


def test_added_tokens_count_by_their_id(folder: Path) -> None:
    vocab = {"model": {"vocab": words(90)}, "added_tokens": [{"id": 100, "content": "<new>"}]}
    replace(folder, "tokenizer.json", vocab)
    (found,) = tokenizer_findings(folder)
    assert "ids up to 100, the word embedding 100 rows" in found.what
    assert "resize_token_embeddings(101)" in found.fix


def test_added_tokens_of_the_small_files_count_too(folder: Path) -> None:
    decoder = {"added_tokens_decoder": {"120": {"content": "<x>"}, "bad": {}, "9" * 30: {}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(decoder))
    assert tokenizer_findings(folder)[0].severity == "error"
    (folder / "tokenizer_config.json").unlink()
    (folder / "added_tokens.json").write_text('{"<x>": 130}')
    assert "ids up to 130" in tokenizer_findings(folder)[0].what


def test_a_unigram_vocabulary_is_a_list(folder: Path) -> None:
    replace(folder, "tokenizer.json", {"model": {"type": "Unigram", "vocab": [[f"w{i}", -1.0] for i in range(100)]}})
    assert "100 tokens for 100 rows" in tokenizer_findings(folder)[0].what


def test_a_vocabulary_of_bpe_is_read(folder: Path) -> None:
    replace(folder, "vocab.json", words(99))
    assert "vocab.json: 99 tokens" in tokenizer_findings(folder)[0].what


def test_pieces_of_a_sentencepiece_model_are_counted(folder: Path) -> None:
    piece = b"\x0a\x07" + b"\x0a\x02ab" + b"\x15\0\0"  # one message of 7 bytes
    trainer = b"\x12\x03abc"
    replace(folder, "spiece.model", piece * 120 + trainer)
    assert "ids up to 119" in tokenizer_findings(folder)[0].what


def test_a_much_smaller_tokenizer_is_anothers() -> None:
    from vramfit.checkpoints.tokenizer import Vocabulary, check_size

    def judge(count: int, rows: int) -> str:
        vocabulary = Vocabulary(file="x", num_tokens=count, num_ids=count, has=None, special={})
        return check_size(vocabulary, rows).severity

    assert judge(28_996, 30_522) == "warning"  # a cased tokenizer beside an uncased model
    assert judge(128_001, 128_100) == "ok"  # DeBERTa-v3
    assert judge(50_280, 50_368) == "ok"  # ModernBERT


def test_a_folder_without_a_tokenizer_is_only_told_so(folder: Path) -> None:
    (folder / "vocab.txt").unlink()
    (found,) = tokenizer_findings(folder)
    assert (found.check, found.severity) == ("tokenizer.absent", "info")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_tokenizer_is_an_error_but_not_fatal(folder: Path, content: bytes) -> None:
    replace(folder, "tokenizer.json", content)
    (found,) = tokenizer_findings(folder)
    assert (found.check, found.severity, found.fatal) == ("tokenizer.damaged", "error", False)


@pytest.mark.parametrize("data", [{}, {"model": 3}, {"model": {"vocab": 7}}, {"model": {"vocab": {"a": "b"}}}])
def test_a_tokenizer_of_odd_types_does_no_harm(folder: Path, data: Any) -> None:
    replace(folder, "tokenizer.json", data)
    assert tokenizer_findings(folder)


@pytest.mark.parametrize(
    "content", [b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b", b"\x80" * 50, b"\x09\x08"]
)
def test_a_damaged_sentencepiece_model_ends(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "spiece.model").write_bytes(content)
    vocabulary = read_vocabulary(tmp_path)
    assert vocabulary is not None
    assert vocabulary.num_tokens <= 1


def test_the_tokenizer_of_the_real_checkpoint_fits(real_folder: Path) -> None:
    vocabulary = read_vocabulary(real_folder)
    assert vocabulary is not None
    assert vocabulary.num_ids == 30_522
    assert vocabulary.special["pad_token"] == "[PAD]"
