"""Token classification: a tag for each word of a text, and the entities that tags mark."""

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vramfit.tasks.base import IGNORED, BatchRows, References, Rows, Task, zeros
from vramfit.tasks.parts.reading import (
    BadValue,
    Columns,
    Encoded,
    LabelNames,
    Reference,
    Row,
    Tokenizing,
    check_characters,
    chunks,
    cut,
    text_in,
)
from vramfit.tasks.parts.results import MeanLoss, best_labels, best_scores, class_losses, place_of, rounded
from vramfit.units import counted, shown

WORD = re.compile(r"\w+|[^\w\s]")
"""Words of a text that no one has split: runs of letters and digits, and each mark by itself."""
OUTSIDE = "O"
PREFIXES = ("B-", "I-", "E-", "S-")


class TokenClassification(Task):
    """See the module."""

    name = "token-classification"
    title = "Token classification"
    rank = 20
    auto_class = "AutoModelForTokenClassification"
    is_trained = is_served = True
    has_classes = shares_head_names = True
    can_record = can_smooth = True
    max_scores = 1000
    answers = ("logits",)
    answers_tokens = True
    text_names = (("tokens",), ("words",), ("text",), ("sentence",))
    label_columns = ("ner_tags", "tags", "labels", "label", "ner", "pos_tags", "chunk_tags")
    files = (
        "token-classification takes a tag for every token: a .conll file (a token and its tag a line, blank lines "
        "between sentences), or JSON lines with the lists tokens and tags"
    )
    truth = "tags"
    reads_conll = True
    request_forms = ('"a text"', '{"tokens": ["…", "…"]}')
    request_fields = (("tokens",), ("text",))
    answers_every_word = True

    def meta_labels(self, model: Any, batch: int, seq: int, device: Any) -> Any:
        return {"labels": zeros(device, batch, seq)}

    def loss(self, model: Any, batch: Any) -> Any:
        from vramfit.tasks.parts.losses import token_labels_loss

        return token_labels_loss(model, batch)

    def numbers_per_sample(self, num_labels: int, seq: int, vocab_size: int) -> tuple[int, int]:
        return num_labels * seq, seq

    def read_row(self, row: Row, columns: Columns, labels: LabelNames) -> Reference:
        """`text`; `spans`: where each word begins and ends in it; `tags`: their names, or None."""
        column = columns.texts[0]
        value = row.fields.get(column)
        if isinstance(value, list):
            text, spans = _joined(value, column)
            check_characters(text, column)
        else:
            text = text_in(row, column)
            found = re.finditer(r"\S+", text) if columns.label is not None else WORD.finditer(text)
            spans = [match.span() for match in found]
        if columns.label is None:
            return {"text": text, "spans": spans, "tags": None}
        tags = row.fields.get(columns.label)
        tags = tags.split() if isinstance(tags, str) else tags
        if not isinstance(tags, list):
            raise BadValue(f"{columns.label} is {'missing' if tags is None else shown(tags)}, not a list of tags")
        if len(tags) != len(spans):
            of_the_text = "" if labels.are_given else "; for one label a text: --task sequence-classification"
            hint = self.files + of_the_text if len(tags) == 1 else ""
            raise BadValue(f"{counted(len(tags), 'tag')} for {counted(len(spans), 'token')}", hint=hint)
        return {"text": text, "spans": spans, "tags": [labels.name_of(tag) for tag in tags]}

    def class_names(self, labels: LabelNames, references: References) -> tuple[str, ...]:
        return labels.names(tag for r in references for tag in r["tags"] or ())

    def encode(self, references: References, how: Tokenizing) -> Iterator[Encoded]:
        """The first token of a word carries its tag, the others are ignored.

        Adds `first` to each reference: the token each word begins with, -1 for a word that was cut off.
        """
        numbers = how.label_numbers
        for chunk in chunks(references):
            made_of_all = cut(how, chunk, return_offsets_mapping=True)
            for reference, (full, made) in zip(chunk, made_of_all, strict=True):
                first = _first_tokens(reference["spans"], made["offset_mapping"])
                labels = _word_labels(reference["tags"], first, len(made["input_ids"]), numbers)
                yield Encoded(reference | {"first": first}, made["input_ids"], (), labels, full)

    def batch_labels(self, batch: Any, rows: BatchRows, hiding: Any) -> Any:
        if not rows.are_labelled:
            return {}
        return {"labels": rows.labels.padded(rows.indices, batch["input_ids"].shape[1], IGNORED)}

    def metrics(self, how: Tokenizing, references: References) -> "TagMetrics":
        return TagMetrics(how.label_names)

    def predictions(self, output: Any, batch: Any, references: References, how: Tokenizing) -> Rows:
        """`entities` with type, text, characters and probability, and a tag for each word."""
        found = zip(references, *best_labels(output.logits, references), strict=True)
        return [_tag_row(reference, places, values, how.label_names) for reference, values, places in found]

    def cut_request(self, reference: Reference, cut: Callable[[str], str]) -> Reference:
        return {**reference, "text": cut(reference["text"]), "whole": reference["text"]}

    def encode_requests(self, references: References, how: Tokenizing) -> Iterator[Encoded]:
        for sample in self.encode(references, how):
            yield sample._replace(reference={**sample.reference, "text": sample.reference["whole"]})


def _joined(tokens: list[Any], column: str) -> tuple[str, list[tuple[int, int]]]:
    """Tokens with a space between them, and the place of each."""
    if not tokens:
        raise BadValue(f"{column} is empty")
    strange = next((token for token in tokens if not isinstance(token, str)), None)
    if strange is not None or None in tokens:
        raise BadValue(f"{column} has {shown(strange)} in it, which is no text")
    spans = []
    begin = 0
    for token in tokens:
        spans.append((begin, begin + len(token)))
        begin += len(token) + 1
    return " ".join(tokens), spans


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


def _tag_row(
    reference: Reference, labels: list[list[int]], probabilities: list[list[float]], names: Sequence[str]
) -> dict[str, Any]:
    """Of each token, the best labels and their probabilities are given, the best first."""
    first, text, spans = reference["first"], reference["text"], reference["spans"]
    tags = [names[labels[place][0]] if place >= 0 else OUTSIDE for place in first]
    found = []
    for kind, begin, end in entities(tags) if are_spans(names) else _words(tags):
        sure = [probabilities[first[word]][0] for word in range(begin, end + 1)]
        start, stop = spans[begin][0], spans[end][1]
        entity = {"type": kind, "text": text[start:stop], "start": start, "end": stop}
        found.append(entity | {"probability": rounded(sum(sure) / len(sure))})
    row = place_of(reference) | {"entities": found, "tags": tags}
    if top_k := reference.get("top_k"):
        seen = [(probabilities[place], labels[place]) if place >= 0 else ([], []) for place in first]
        row["scores"] = [best_scores(values, places, names, top_k) for values, places in seen]
    num_cut = sum(place < 0 for place in first)
    return row | {"num_words_cut": num_cut} if num_cut else row


def _words(tags: list[str]) -> list[tuple[str, int, int]]:
    """Tags that mark no spans: each word by itself."""
    return [(tag, place, place) for place, tag in enumerate(tags) if tag != OUTSIDE]


class TagMetrics:
    """Entity `precision`, `recall` and `f1`, word `accuracy`, `loss`.

    A word that was cut off counts as found to be outside of everything: what truncation loses is not hidden. Where the
    tags mark no spans (parts of speech), there is the accuracy only.
    """

    higher_is_better = True

    def __init__(self, label_names: Sequence[str]) -> None:
        self._names = list(label_names)
        self._has_spans = are_spans(label_names)
        self.best_metric = "f1" if self._has_spans else "accuracy"
        self._counts = EntityCounts()
        self._loss = MeanLoss()

    def update(self, output: Any, batch: Any, references: References) -> None:
        labels = batch["labels"].to(output.logits.device)
        labelled = labels != IGNORED
        self._loss.add(class_losses(output.logits[labelled], labels[labelled]))
        for chosen, reference in zip(output.logits.argmax(-1).tolist(), references, strict=True):
            found = [self._names[chosen[place]] if place >= 0 else OUTSIDE for place in reference["first"]]
            self._counts.add(reference["tags"], found)

    def merge(self, other: "TagMetrics") -> None:
        self._counts.merge(other._counts)
        self._loss.merge(other._loss)

    def result(self) -> dict[str, float]:
        accuracy = self._counts.num_words_right / self._counts.num_words if self._counts.num_words else 0.0
        spans = self._counts.scores() if self._has_spans else {}
        return spans | {"accuracy": accuracy, "loss": self._loss.mean()}


def are_spans(label_names: Sequence[str]) -> bool:
    """Whether tags mark the beginning and the inside of entities, of one kind (B, I) or several (B-person, I-person).

    >>> are_spans(["B", "I", "O"]), are_spans(["NOUN", "VERB"])
    (True, False)
    """
    return any(name.startswith(PREFIXES) for name in label_names) or {"B", "I"} <= set(label_names)


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Type, first and last word of each entity.

    B begins one and I goes on with it; an I that follows nothing of its type begins one too, as in conlleval. E and S
    (the last word, a single one) are understood.

    >>> entities(["B-person", "I-person", "O", "I-place"])
    [('person', 0, 1), ('place', 3, 3)]
    """
    found = []
    begin = 0
    last_mark, last_kind = OUTSIDE, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        mark, kind = tag[:1], tag[1:].split("-", maxsplit=1)[-1] or "_"
        if _ends(last_mark, mark, last_kind, kind):
            found.append((last_kind, begin, place - 1))
        if _begins(last_mark, mark, last_kind, kind):
            begin = place
        last_mark, last_kind = mark, kind
    return found


def _ends(last_mark: str, mark: str, last_kind: str, kind: str) -> bool:
    if last_mark in ("E", "S"):
        return True
    if last_mark in ("B", "I") and mark in ("B", "S", OUTSIDE):
        return True
    return last_mark != OUTSIDE and last_kind != kind


def _begins(last_mark: str, mark: str, last_kind: str, kind: str) -> bool:
    if mark in ("B", "S"):
        return True
    if mark in ("E", "I") and last_mark in ("E", "S", OUTSIDE):
        return True
    return mark != OUTSIDE and last_kind != kind


@dataclass(slots=True)
class EntityCounts:
    """Sums over sentences: exact spans of the right type."""

    num_right: int = 0
    num_found: int = 0
    num_true: int = 0
    num_words_right: int = 0
    num_words: int = 0

    def add(self, true: Sequence[str], found: Sequence[str]) -> None:
        """One sentence."""
        there, said = set(entities(true)), set(entities(found))
        self.num_right += len(there & said)
        self.num_found += len(said)
        self.num_true += len(there)
        self.num_words_right += sum(a == b for a, b in zip(true, found, strict=True))
        self.num_words += len(true)

    def merge(self, other: "EntityCounts") -> None:
        """The sentences of another one."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def scores(self) -> dict[str, float]:
        """Precision, recall and F1 over all entities; 0 where there is nothing to divide by."""
        precision = self.num_right / self.num_found if self.num_found else 0.0
        recall = self.num_right / self.num_true if self.num_true else 0.0
        total = precision + recall
        return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / total if total else 0.0}


TASK = TokenClassification()
