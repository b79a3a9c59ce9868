"""Texts to tokens, in batches: cut to a length, with a label for each word, or in windows that overlap."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vramfit.errors import WorkloadError
from vramfit.runtime.data.examples import Reference
from vramfit.techniques.packing import IGNORED

CHUNK_ROWS = 1024
CHUNK_CHARACTERS = 2_000_000
"""Texts that go to the tokenizer at once: few enough that very long ones do not fill the memory."""
MIN_STEP = 8
"""A window of a context moves by at least this part of the length (one eighth), however long the question is."""


class Encoded(NamedTuple):
    """One sample, or one window of it."""

    reference: Reference
    ids: Sequence[int]
    token_types: Sequence[int]
    """Which of two texts each token belongs to; empty for a single one."""
    labels: Sequence[int]
    """A class, a class for each token, or the first and last token of the answer; empty without labels."""
    full_length: int
    """Tokens before the cut; of the whole, where this is a window of it."""


def check_room(tokenizer: Any, max_length: int, *, pair: bool) -> None:
    """Raises WorkloadError where a length has no room for more than the special tokens."""
    least = int(tokenizer.num_special_tokens_to_add(pair=pair)) + (2 if pair else 1)
    if max_length < least:
        raise WorkloadError([f"a length of {max_length} tokens leaves no room for text; {least} is the least"])


def _chunks(references: Sequence[Reference]) -> Iterator[list[Reference]]:
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


def _tokenize(tokenizer: Any, texts: Sequence[tuple[str, ...]], **options: Any) -> Any:
    columns = [list(column) for column in zip(*texts, strict=True)]
    return tokenizer(
        *columns, verbose=False, return_attention_mask=False, return_token_type_ids=len(columns) > 1, **options
    )


def _cut(tokenizer: Any, chunk: list[Reference], max_length: int, **options: Any) -> list[tuple[int, dict[str, Any]]]:
    """Full length and encoding of each text. What is too long is done once more, and cut by the tokenizer itself."""
    texts = [texts_of(reference) for reference in chunk]
    made = _tokenize(tokenizer, texts, truncation=False, **options)
    lengths = [len(ids) for ids in made["input_ids"]]
    results = [{key: made[key][i] for key in made} for i in range(len(chunk))]
    long = [i for i, length in enumerate(lengths) if length > max_length]
    if long:
        again = _tokenize(tokenizer, [texts[i] for i in long], truncation=True, max_length=max_length, **options)
        for place, i in enumerate(long):
            results[i] = {key: again[key][place] for key in again}
    return list(zip(lengths, results, strict=True))


def encode_texts(
    references: Sequence[Reference], tokenizer: Any, max_length: int, label_names: Sequence[str]
) -> Iterator[Encoded]:
    """Texts or pairs of them, with the number of their class where they have one."""
    numbers = {name: number for number, name in enumerate(label_names)}
    for chunk in _chunks(references):
        for reference, (full, made) in zip(chunk, _cut(tokenizer, chunk, max_length), strict=True):
            label = reference.get("label")
            labels = [] if label is None else [numbers[label]]
            yield Encoded(reference, made["input_ids"], made.get("token_type_ids", ()), labels, full)


def encode_words(
    references: Sequence[Reference], tokenizer: Any, max_length: int, label_names: Sequence[str]
) -> Iterator[Encoded]:
    """Texts whose words have tags: the first token of a word carries it, the others are ignored.

    Adds `first` to each reference: the token each word begins with, -1 for a word that was cut off.
    """
    numbers = {name: number for number, name in enumerate(label_names)}
    for chunk in _chunks(references):
        cut = _cut(tokenizer, chunk, max_length, return_offsets_mapping=True)
        for reference, (full, made) in zip(chunk, cut, strict=True):
            first = _first_tokens(reference["spans"], made["offset_mapping"])
            labels = _word_labels(reference["tags"], first, len(made["input_ids"]), numbers)
            known = reference | {"first": first}
            yield Encoded(known, made["input_ids"], (), labels, full)


def _first_tokens(spans: list[tuple[int, int]], offsets: list[tuple[int, int]]) -> "array[int]":
    """The token that each word begins with. Some tokenizers count the space before a word as part of it."""
    ends = [end for _, end in spans]
    first = array("i", [-1]) * len(spans)
    for position, (begin, end) in enumerate(offsets):
        if end > begin:
            word = bisect_right(ends, begin)
            if word < len(first) and first[word] < 0:
                first[word] = position
    return first


def _word_labels(tags: list[str] | None, first: "array[int]", length: int, numbers: dict[str, int]) -> list[int]:
    if tags is None:
        return []
    labels = [IGNORED] * length
    for tag, position in zip(tags, first, strict=True):
        if position >= 0:
            labels[position] = numbers[tag]
    return labels


def encode_questions(
    references: Sequence[Reference], tokenizer: Any, max_length: int, stride: int
) -> Iterator[Encoded]:
    """Questions with their contexts; a long context comes in windows that overlap by `stride` tokens.

    Adds to each window's reference `question_number`; `context_at`: the place of its first token of the context;
    `offsets`: first and last character of each of these, end to end; `cls`: the token that means no answer.
    """
    overlap = min(stride, max_length // 2)
    room = max_length - int(tokenizer.num_special_tokens_to_add(pair=True)) - overlap
    longest_question = max(room - max(max_length // MIN_STEP, 1), 1)
    overlap = max(min(overlap, room + overlap - longest_question - 1), 0)
    number = 0
    for chunk in _chunks(references):
        questions = _shortened([r["question"] for r in chunk], tokenizer, longest_question)
        texts = [(question, r["context"]) for question, r in zip(questions, chunk, strict=True)]
        made = _tokenize(
            tokenizer,
            texts,
            truncation="only_second",
            max_length=max_length,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        owners = made["overflow_to_sample_mapping"]
        parts = [_context_part(made.sequence_ids(i)) for i in range(len(owners))]
        full = _full_lengths(made, owners, parts, overlap)
        for i, owner in enumerate(owners):
            yield _window(chunk[owner], number + owner, made, i, parts[i], full[owner], tokenizer)
        number += len(chunk)


def _shortened(questions: list[str], tokenizer: Any, most: int) -> list[str]:
    """Questions cut to a number of tokens, so that some of the context is always in sight."""
    made = tokenizer(questions, add_special_tokens=False, verbose=False)
    long = [len(ids) > most for ids in made["input_ids"]]
    return [_shorten(q, tokenizer, most) if cut else q for q, cut in zip(questions, long, strict=True)]


def _shorten(question: str, tokenizer: Any, most: int) -> str:
    """Cut inside a word, what is left may split into more tokens than before: then a little more is cut."""
    for limit in range(most, 0, -1):
        made = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        if len(made["input_ids"]) <= most:
            break
        question = question[: made["offset_mapping"][limit - 1][1]]
    return question


def _context_part(sequence: list[int | None]) -> tuple[int, int]:
    """First token of the context, and the one after its last."""
    if 1 not in sequence:
        return 0, 0
    begin = sequence.index(1)
    return begin, begin + sequence.count(1)


def _full_lengths(made: Any, owners: list[int], parts: list[tuple[int, int]], overlap: int) -> list[int]:
    """Tokens that each question takes with its whole context."""
    full: dict[int, int] = {}
    for ids, owner, (begin, end) in zip(made["input_ids"], owners, parts, strict=True):
        full[owner] = full[owner] + end - begin - overlap if owner in full else len(ids)
    return [full[owner] for owner in range(len(full))]


def _window(
    reference: Reference, number: int, made: Any, i: int, part: tuple[int, int], full: int, tokenizer: Any
) -> Encoded:
    ids, offsets = made["input_ids"][i], made["offset_mapping"][i][slice(*part)]
    cls = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
    flat = array("i", (place for span in offsets for place in span))
    known = reference | {"question_number": number, "context_at": part[0], "offsets": flat, "cls": cls}
    labels: list[int] = []
    if reference["answers"] is not None:
        labels = _answer_tokens(reference["answer_at"], offsets, part[0]) or [cls, cls]
    return Encoded(known, ids, made["token_type_ids"][i], labels, full)


def _answer_tokens(where: tuple[int, int] | None, offsets: list[tuple[int, int]], begin: int) -> list[int] | None:
    """First and last token of an answer; None where the window does not hold all of it."""
    if where is None or not offsets or where[0] < offsets[0][0] or where[1] > offsets[-1][1]:
        return None
    starts = [start for start, _ in offsets]
    first = max(bisect_right(starts, where[0]) - 1, 0)
    last = max(bisect_right(starts, where[1] - 1) - 1, first)
    return [begin + first, begin + last]
