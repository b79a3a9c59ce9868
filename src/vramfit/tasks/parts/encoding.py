"""Texts to tokens, many at a time, each cut to a length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vramfit.errors import WorkloadError
from vramfit.tasks.parts.reading import Reference

CHUNK_ROWS = 1024
CHUNK_CHARACTERS = 2_000_000
"""Texts that go to the tokenizer at once: few enough that very long ones do not fill the memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizing:
    """How references become tokens."""

    tokenizer: Any
    """A fast one, as `load_tokenizer` gives it."""
    max_length: int
    """Tokens a sample may have, special ones included."""
    label_names: Sequence[str] = ()
    """Names of the classes, in the order of their numbers."""
    stride: int = 0
    """Tokens that two windows of one text share, where a task reads windows."""

    @property
    def label_numbers(self) -> dict[str, int]:
        """The number of each class."""
        return {name: number for number, name in enumerate(self.label_names)}


class Encoded(NamedTuple):
    """One sample, or one window of it."""

    reference: Reference
    ids: Sequence[int]
    token_types: Sequence[int]
    """Which of two texts each token belongs to; empty for a single one."""
    labels: Sequence[float]
    """Numbers that the task makes labels of: a class, a class for each token; empty without labels."""
    full_length: int
    """Tokens before the cut; of the whole, where this is a window of it."""


def check_room(tokenizer: Any, max_length: int, *, pair: bool) -> None:
    """Raises WorkloadError where a length has no room for more than the special tokens."""
    least = int(tokenizer.num_special_tokens_to_add(pair=pair)) + (2 if pair else 1)
    if max_length < least:
        raise WorkloadError([f"a length of {max_length} tokens leaves no room for text; {least} is the least"])


def chunks(references: Sequence[Reference]) -> Iterator[list[Reference]]:
    """References in parts that go to the tokenizer at once."""
    chunk: list[Reference] = []
    size = 0
    for reference in references:
        chunk.append(reference)
        size += sum(len(t) for t in texts_of(reference))
        if len(chunk) == CHUNK_ROWS or size > CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def texts_of(reference: Reference) -> tuple[str, ...]:
    """What goes to the tokenizer."""
    if "texts" in reference:
        texts: tuple[str, ...] = reference["texts"]
        return texts
    return (reference["question"], reference["context"]) if "question" in reference else (reference["text"],)


def tokenize(tokenizer: Any, texts: Sequence[tuple[str, ...]], **options: Any) -> Any:
    """What the tokenizer gives for texts or pairs of them."""
    columns = [list(column) for column in zip(*texts, strict=True)]
    return tokenizer(
        *columns, verbose=False, return_attention_mask=False, return_token_type_ids=len(columns) > 1, **options
    )


def cut(how: Tokenizing, chunk: list[Reference], **options: Any) -> list[tuple[int, dict[str, Any]]]:
    """Full length and encoding of each text. What is too long is done once more, and cut by the tokenizer itself."""
    tokenizer, max_length = how.tokenizer, how.max_length
    texts = [texts_of(reference) for reference in chunk]
    made = tokenize(tokenizer, texts, truncation=False, **options)
    lengths = [len(ids) for ids in made["input_ids"]]
    results = [{key: made[key][i] for key in made} for i in range(len(chunk))]
    long = [i for i, length in enumerate(lengths) if length > max_length]
    if long:
        again = tokenize(tokenizer, [texts[i] for i in long], truncation=True, max_length=max_length, **options)
        for place, i in enumerate(long):
            results[i] = {key: again[key][place] for key in again}
    return list(zip(lengths, results, strict=True))


def encode_texts(references: Sequence[Reference], how: Tokenizing) -> Iterator[Encoded]:
    """Texts or pairs of them; a `label` that is a name becomes its number, and one that is a number stays."""
    numbers = how.label_numbers
    for chunk in chunks(references):
        for reference, (full, made) in zip(chunk, cut(how, chunk), strict=True):
            label = reference.get("label")
            labels = [] if label is None else [numbers[label] if isinstance(label, str) else label]
            yield Encoded(reference, made["input_ids"], made.get("token_type_ids", ()), labels, full)
