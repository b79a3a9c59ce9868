"""Shapes of the checkpoint against those of the model: which field of the configuration they contradict."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from vramfit.checkpoints.matching import ShapeMismatch
from vramfit.checkpoints.subject import Subject
from vramfit.checkpoints.wording import sizes
from vramfit.records.finding import Finding

_FIELDS = (
    *("vocab_size", "hidden_size", "dim", "embedding_size", "intermediate_size", "hidden_dim"),
    *("max_position_embeddings", "type_vocab_size", "num_labels"),
)
"""Fields of a configuration that become sizes of tensors, most likely culprit first."""


_ONLY_OF: Mapping[str, Sequence[str]] = {
    "vocab_size": ("word_embeddings", "tok_embeddings", "predictions", "decoder", "lm_head", "vocab_projector"),
    "max_position_embeddings": ("position",),
    "type_vocab_size": ("token_type",),
    "num_labels": ("classifier", "outputs", "score", "proj"),
}
"""Fields that size a few tensors only: a part of those tensors' names."""

_Culprit = tuple[str, int, int]
"""A field, what config.json says, and what the checkpoint says."""


def check_shapes(subject: Subject) -> list[Finding]:
    """Findings about tensors of another shape than the model's, one for each field at fault."""
    labels = [m for m in subject.matching.mismatched if is_about_labels(subject, m)]
    others = [m for m in subject.matching.mismatched if not is_about_labels(subject, m)]
    suspects = {m.name: _suspects(subject, m) for m in others}
    votes = Counter(culprit for found in suspects.values() for culprit in found)
    groups: dict[_Culprit, list[ShapeMismatch]] = defaultdict(list)
    for mismatch in others:
        found = suspects[mismatch.name]
        groups[max(found, key=lambda c: (votes[c], c[0] in _ONLY_OF)) if found else ("", 0, 0)].append(mismatch)
    findings = [_contradiction(*culprit, found) for culprit, found in groups.items()]
    if labels:
        findings.append(_labels(subject, labels))
    return findings


def is_about_labels(subject: Subject, mismatch: ShapeMismatch) -> bool:
    """Whether a tensor of the head differs in nothing but the number of labels."""
    expected, has = mismatch.expected, mismatch.entry.shape
    num_labels = getattr(subject.resolved.config, "num_labels", None)
    is_row = len(expected) == len(has) > 0 and expected[0] == num_labels and expected[1:] == has[1:]
    return is_row and mismatch.name in subject.head


def _suspects(subject: Subject, mismatch: ShapeMismatch) -> list[_Culprit]:
    """Fields that have the size which differs, most likely first; none where no field has."""
    if len(mismatch.expected) != len(mismatch.entry.shape):
        return []
    differing = [(e, h) for e, h in zip(mismatch.expected, mismatch.entry.shape, strict=True) if e != h]
    return [
        (field, expected, has)
        for field in _FIELDS
        for expected, has in differing
        if getattr(subject.resolved.config, field, None) == expected
        and any(part in mismatch.name for part in _ONLY_OF.get(field, ("",)))
    ]


def _contradiction(field: str, was: int, has: int, found: Sequence[ShapeMismatch]) -> Finding:
    first = found[0]
    example = f"{first.entry.name} is {sizes(first.entry.shape)} there, {sizes(first.expected)} in the model"
    more = f" (and {len(found) - 1} more tensors)" if len(found) > 1 else ""
    said = f"config.json says {field} {was:,}, the checkpoint {has:,}: " if field else "a shape differs: "
    return Finding(
        check=f"weights.shape.{field}" if field else "weights.shape",
        severity="error",
        what=said + example + more,
        why="loading fails, or, with ignore_mismatched_sizes, these tensors start at random",
        fix="use the config.json that belongs to these weights"
        + (f"; there {field} should be {has:,}" if field else ""),
        fatal=True,
    )


def _labels(subject: Subject, found: Sequence[ShapeMismatch]) -> Finding:
    first = found[0]
    shapes = f"{first.entry.name} is {sizes(first.entry.shape)} in the checkpoint, {sizes(first.expected)} in the model"
    rows = first.entry.shape[0] if first.entry.shape else 0
    asked = subject.num_labels_asked
    if asked is not None:
        return Finding(
            check="weights.head_replaced",
            severity="warning",
            what=f"a head for {asked} labels was asked for, the checkpoint's has {rows}: {shapes}",
            why="the head starts at random and must be trained",
            fix=f"leave num_labels out, or give {rows}, to keep the head of the checkpoint",
        )
    return Finding(
        check="weights.labels",
        severity="error",
        what=f"config.json has {_num_labels(subject.resolved.config)} labels, the checkpoint's head {rows}: {shapes}",
        why="the head cannot be loaded",
        fix=f"give id2label in config.json {rows} labels, or ask for a new head with num_labels",
        fatal=True,
    )


def _num_labels(config: Any) -> int:
    return len(getattr(config, "id2label", None) or ())
