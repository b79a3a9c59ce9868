"""The tokenizer's files, read without the tokenizers library, and their vocabulary against the word embedding.

Every id must be a row, and the two should be made for each other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.checkpoints.files import read_bytes, read_json_object, shown
from vramfit.checkpoints.matching import Subject
from vramfit.errors import CheckpointError
from vramfit.models import vocab_size
from vramfit.models.hub import plain_file
from vramfit.records.finding import Finding

MAX_SPARE_SHARE = 0.03
MAX_SPARE_ROWS = 1024
"""Rows beyond the tokenizer that padding to a round number explains (DeBERTa-v3 has 99, ModernBERT 88)."""

SPECIAL_TOKENS = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token", "bos_token", "eos_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The tokens of one tokenizer."""

    file: str
    """The file that was read."""
    num_tokens: int
    """Tokens of the model itself."""
    num_ids: int
    """The highest id plus one, added tokens included."""
    has: frozenset[str] | None
    """The tokens; None where only their number is known."""
    special: Mapping[str, str]
    """Role → token, such as `pad_token` → `[PAD]`."""


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    """Findings about the tokenizer in the checkpoint's folder."""
    try:
        vocabulary = read_vocabulary(subject.files.folder)
    except CheckpointError as error:
        fix = error.hint or "download the tokenizer's files again"
        yield Finding.error("tokenizer.damaged", str(error), "text cannot be turned into tokens", fix)
        return
    if vocabulary is None:
        yield Finding.info(
            "tokenizer.absent",
            "no tokenizer in the folder",
            "the model can be loaded, but text cannot be turned into tokens for it",
            "put the tokenizer of the same model next to the weights (tokenizer.save_pretrained)",
        )
        return
    rows = _rows(subject)
    if rows is None:
        return
    yield check_size(vocabulary, rows)
    for role, token in vocabulary.special.items():
        if vocabulary.has is not None and token not in vocabulary.has:
            yield Finding.warning(
                "tokenizer.special_tokens",
                f"{role} is {shown(token)}, which {vocabulary.file} does not have",
                "it would become the unknown token, or be added beyond the embedding's rows",
                "use special_tokens_map.json and vocabulary of one model",
            )


def _rows(subject: Subject) -> int | None:
    """Rows of the word embedding: in the checkpoint, else in the model."""
    words = next((n for n in subject.state if n.endswith(("word_embeddings.weight", "tok_embeddings.weight"))), "")
    by_target = {target: name for name, target in subject.matching.targets.items()}
    entry = next((e for e in subject.entries if words and e.name == by_target.get(words)), None)
    return entry.shape[0] if entry is not None and entry.shape else vocab_size(subject.model)


def check_size(vocabulary: Vocabulary, rows: int) -> Finding:
    """Whether every id is a row of the word embedding, and about every row an id."""
    file, count, spare = vocabulary.file, vocabulary.num_ids, rows - vocabulary.num_ids
    if spare < 0:
        return Finding.error(
            "tokenizer.size",
            f"{file} has ids up to {count - 1:,}, the word embedding {rows:,} rows",
            "a text with such a token fails: index out of range, on a GPU a device-side assert",
            "use the tokenizer that belongs to the weights, or call "
            f"model.resize_token_embeddings({count}) and train the new rows",
        )
    if spare > MAX_SPARE_ROWS or spare > max(MAX_SPARE_SHARE * rows, 128):
        return Finding.warning(
            "tokenizer.size",
            f"{file} has {count:,} tokens, the word embedding {rows:,} rows",
            "the tokenizer seems to be another model's: every word may get the wrong vector",
            "use the tokenizer that belongs to the weights",
        )
    return Finding.ok("tokenizer.size", f"{file}: {count:,} tokens for {rows:,} rows of the word embedding")


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of the tokenizer in a folder; None when there is no tokenizer.

    Raises:
        CheckpointError: a file that is damaged, too large, or a link out of the folder.
    """
    special, added = _special_tokens(folder)
    for name, read in (
        ("tokenizer.json", _read_tokenizer_json),
        ("vocab.txt", _read_lines),
        ("vocab.json", _read_vocab_json),
        ("spiece.model", _count_pieces),
        ("spm.model", _count_pieces),
        ("sentencepiece.bpe.model", _count_pieces),
    ):
        path = plain_file(folder, name)
        if path is not None:
            tokens, num_tokens = read(path)
            ids = {**(tokens or {}), **added}
            highest = max(ids.values(), default=-1)
            has = None if tokens is None else frozenset(ids)
            return Vocabulary(
                file=name, num_tokens=num_tokens, num_ids=max(highest + 1, num_tokens), has=has, special=special
            )
    return None


def _special_tokens(folder: Path) -> tuple[dict[str, str], dict[str, int]]:
    """Roles of tokens, and added tokens with their ids, from the configuration files of the tokenizer."""
    special: dict[str, str] = {}
    added: dict[str, int] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = plain_file(folder, name)
        data = read_json_object(path, what="tokenizer configuration") if path is not None else {}
        for role in SPECIAL_TOKENS:
            value = data.get(role)
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str):
                special[role] = token
        decoder = data.get("added_tokens_decoder")
        for number, token in decoder.items() if isinstance(decoder, dict) else ():
            if number.isascii() and number.isdigit() and len(number) < 12 and isinstance(token, dict):
                added[str(token.get("content"))] = int(number)
    path = plain_file(folder, "added_tokens.json")
    if path is not None:
        added |= _ids(read_json_object(path, what="list of added tokens"))
    return special, added


def _read_tokenizer_json(path: Path) -> tuple[dict[str, int], int]:
    data = read_json_object(path, what="tokenizer")
    model: Any = data.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        tokens = _ids(vocab)
    elif isinstance(vocab, list):  # Unigram: pairs of token and score, numbered by their place
        tokens = {str(pair[0]): i for i, pair in enumerate(vocab) if isinstance(pair, list) and pair}
    else:
        tokens = {}
    num_tokens = len(vocab) if isinstance(vocab, list | dict) else 0
    added = data.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and type(token.get("id")) is int:
            tokens[str(token.get("content"))] = token["id"]
    return tokens, num_tokens


def _read_lines(path: Path) -> tuple[dict[str, int], int]:
    lines = read_bytes(path, what="vocabulary").decode("utf-8", errors="replace").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return {line.rstrip("\r"): number for number, line in enumerate(lines)}, len(lines)


def _read_vocab_json(path: Path) -> tuple[dict[str, int], int]:
    tokens = _ids(read_json_object(path, what="vocabulary"))
    return tokens, len(tokens)


def _ids(data: Mapping[str, Any]) -> dict[str, int]:
    return {token: number for token, number in data.items() if type(number) is int and 0 <= number < 2**40}


def _count_pieces(path: Path) -> tuple[None, int]:
    """Pieces of a sentencepiece model: field 1 of its protobuf message, once for each."""
    content = read_bytes(path, what="vocabulary")
    position, count = 0, 0
    while position < len(content):
        tag, position = _varint(content, position)
        kind = tag & 7
        if kind == 0:
            _, position = _varint(content, position)
        elif kind == 2:
            length, position = _varint(content, position)
            position += length
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            break
        count += tag == 0x0A
    return None, count


def _varint(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(content) and shift < 64:
        byte = content[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            break
    return value, position
