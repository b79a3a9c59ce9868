"""The tokenizer against the word embedding: every id must be a row, and the two should be made for each other."""

from vramfit.checkpoints.subject import Subject
from vramfit.checkpoints.tokenizer_files import Vocabulary, read_vocabulary
from vramfit.checkpoints.wording import shown
from vramfit.errors import CheckpointError
from vramfit.models import vocab_size
from vramfit.records.finding import Finding

MAX_SPARE_SHARE = 0.03
MAX_SPARE_ROWS = 1024
"""Rows beyond the tokenizer that padding to a round number explains (DeBERTa-v3 has 99, ModernBERT 88)."""


def check_tokenizer(subject: Subject) -> list[Finding]:
    """Findings about the tokenizer in the checkpoint's folder."""
    try:
        vocabulary = read_vocabulary(subject.files.folder)
    except CheckpointError as error:
        return [
            Finding(
                check="tokenizer.damaged",
                severity="error",
                what=str(error),
                why="text cannot be turned into tokens",
                fix=error.hint or "download the tokenizer's files again",
            )
        ]
    if vocabulary is None:
        return [
            Finding(
                check="tokenizer.absent",
                severity="info",
                what="no tokenizer in the folder",
                why="the model can be loaded, but text cannot be turned into tokens for it",
                fix="put the tokenizer of the same model beside the weights (tokenizer.save_pretrained)",
            )
        ]
    rows = _rows(subject)
    if rows is None:
        return []
    return _check_size(vocabulary, rows) + _check_special(vocabulary)


def _rows(subject: Subject) -> int | None:
    """Rows of the word embedding: in the checkpoint, else in the model."""
    words = next((n for n in subject.state if n.endswith(("word_embeddings.weight", "tok_embeddings.weight"))), "")
    by_target = {target: name for name, target in subject.matching.targets.items()}
    entry = next((e for e in subject.entries if words and e.name == by_target.get(words)), None)
    return entry.shape[0] if entry is not None and entry.shape else vocab_size(subject.model)


def _check_size(vocabulary: Vocabulary, rows: int) -> list[Finding]:
    count = vocabulary.num_ids
    if count > rows:
        return [
            Finding(
                check="tokenizer.size",
                severity="error",
                what=f"{vocabulary.file} has ids up to {count - 1:,}, the word embedding {rows:,} rows",
                why="a text with such a token fails: index out of range, on a GPU a device-side assert",
                fix="use the tokenizer that belongs to the weights, or call "
                f"model.resize_token_embeddings({count}) and train the new rows",
            )
        ]
    spare = rows - count
    if spare > MAX_SPARE_ROWS or spare > max(MAX_SPARE_SHARE * rows, 128):
        return [
            Finding(
                check="tokenizer.size",
                severity="warning",
                what=f"{vocabulary.file} has {count:,} tokens, the word embedding {rows:,} rows",
                why="the tokenizer seems to be another model's: every word may get the wrong vector",
                fix="use the tokenizer that belongs to the weights",
            )
        ]
    return [
        Finding(
            check="tokenizer.size",
            severity="ok",
            what=f"{vocabulary.file}: {count:,} tokens for {rows:,} rows of the word embedding",
        )
    ]


def _check_special(vocabulary: Vocabulary) -> list[Finding]:
    if vocabulary.has is None:
        return []
    return [
        Finding(
            check="tokenizer.special_tokens",
            severity="warning",
            what=f"{role} is {shown(token)}, which {vocabulary.file} does not have",
            why="it would become the unknown token, or be added beyond the embedding's rows",
            fix="use special_tokens_map.json and vocabulary of one model",
        )
        for role, token in vocabulary.special.items()
        if token not in vocabulary.has
    ]
