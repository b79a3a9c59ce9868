"""Named entities in a row of tags, and how many of them were found, as seqeval and conlleval count them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

OUTSIDE = "O"
PREFIXES = ("B-", "I-", "E-", "S-")


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
