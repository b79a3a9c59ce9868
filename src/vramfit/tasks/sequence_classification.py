"""Sequence classification: one class for a text or a pair of texts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from vramfit.errors import DataError
from vramfit.tasks.base import SINGLE_TEXTS, BatchRows, References, Rows, Task, zeros
from vramfit.tasks.parts.reading import Columns, LabelNames, Reference, Row, Tokenizing, some_of, text_in
from vramfit.tasks.parts.results import (
    ClassCounts,
    MeanLoss,
    best_labels,
    best_scores,
    class_losses,
    place_of,
    rounded,
)
from vramfit.units import counted

PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("question", "sentence"),
    ("question", "context"),
)
OTHER_COLUMN = "name the column of the labels: --label-column NAME"
MANY = 10
"""Fewer labels than this are no reason to wonder, however few rows there are; nor are so few decimals, such as half
stars, where each of them comes again."""
MARKS = (",", ";")
"""They join labels where each part is a label of another row; elsewhere they belong to a name."""


class SequenceClassification(Task):
    """See the module."""

    name = "sequence-classification"
    title = "Sequence classification"
    rank = 10
    auto_class = "AutoModelForSequenceClassification"
    is_trained = is_served = True
    has_classes = shares_head_names = True
    can_record = can_smooth = True
    pools_sequences = True
    max_scores = 1000
    counts_samples = True
    num_texts = (1, 2)
    text_names = (*PAIRS, *((name,) for name in SINGLE_TEXTS))
    label_columns = ("label", "labels", "intent", "category", "class", "target", "sentiment", "topic")
    truth = "label"
    takes_lists = False
    guesses_header = True
    request_forms = ('"a text"', '{"text": "…", "text_pair": "…"}')
    request_fields = (("text", "text_pair"), ("text",))

    def meta_labels(self, model: Any, batch: int, seq: int, device: Any) -> Any:
        return {"labels": zeros(device, batch)}

    def loss(self, model: Any, batch: Any) -> Any:
        from vramfit.tasks.parts import losses

        labels = losses.only_labels(batch)
        if labels is None or losses.are_per_token(model, labels):
            return None
        problem = losses.problem_type(model, labels)
        kinds = {"regression": losses.regression_loss, "multi_label_classification": losses.multi_label_loss}
        return kinds.get(problem, losses.class_loss)()

    def numbers_per_sample(self, num_labels: int, seq: int, vocab_size: int) -> tuple[int, int]:
        return num_labels, 1

    def read_row(self, row: Row, columns: Columns, labels: LabelNames) -> Reference:
        """`texts`: one or two; `label`: its name, or None."""
        label = None if columns.label is None else labels.name_of(row.fields.get(columns.label))
        return {"texts": tuple(text_in(row, c) for c in columns.texts), "label": label}

    def class_names(self, labels: LabelNames, references: References) -> tuple[str, ...]:
        return labels.names(r["label"] for r in references if r["label"] is not None)

    def check_labels(self, file: str, labels: LabelNames, num_rows: int, *, has_others: bool) -> None:
        wrong = wrong_kind(labels.new, num_rows, labels.known)
        if wrong is None:
            return
        hint = f"give data with the labels that are known: {some_of(labels.known)}" if labels.are_given else wrong.hint
        raise DataError(f"{file}: {wrong.what}", file=file, hint=f"{hint}; or {OTHER_COLUMN}" if has_others else hint)

    def notes(self, labels: LabelNames, names: Sequence[str], num_rows: int) -> tuple[str, ...]:
        return labels.notes if labels.are_given else doubts(names, num_rows)

    def batch_labels(self, batch: Any, rows: BatchRows, hiding: Any) -> Any:
        return {"labels": rows.labels.column(rows.indices, 0)} if rows.are_labelled else {}

    def metrics(self, label_names: Sequence[str]) -> "ClassMetrics":
        return ClassMetrics(len(label_names))

    def predictions(self, output: Any, batch: Any, references: References, how: Tokenizing) -> Rows:
        """`label` and `probability`."""
        rows, names = [], how.label_names
        for reference, values, places in zip(references, *best_labels(output.logits, references), strict=True):
            row = place_of(reference) | {"label": names[places[0]], "probability": rounded(values[0])}
            top_k = reference.get("top_k")
            rows.append(row | {"scores": best_scores(values, places, names, top_k)} if top_k else row)
        return rows


class ClassMetrics:
    """`accuracy`, `macro_f1`, `loss`; with two classes also `f1` of the second and `mcc`."""

    best_metric = "accuracy"
    higher_is_better = True

    def __init__(self, num_labels: int) -> None:
        self._counts = ClassCounts(num_labels)
        self._loss = MeanLoss()

    def update(self, output: Any, batch: Any, references: References) -> None:
        labels = batch["labels"]
        self._loss.add(class_losses(output.logits, labels))
        self._counts.add(labels.tolist(), output.logits.argmax(-1).tolist())

    def merge(self, other: "ClassMetrics") -> None:
        self._counts.merge(other._counts)
        self._loss.merge(other._loss)

    def result(self) -> dict[str, float]:
        return self._counts.scores() | {"loss": self._loss.mean()}


@dataclass(frozen=True, slots=True)
class WrongKind:
    """What labels are instead of classes."""

    what: str
    hint: str


def wrong_kind(rows: Mapping[str, int], num_rows: int, known: Collection[str] = ()) -> WrongKind | None:
    """What labels are that cannot be learned or compared as classes; None where they can.

    Args:
        rows: label → how many rows have it; of those that are not known.
        num_rows: of all labels.
        known: names of classes, whatever they look like.

    >>> wrong_kind({"toxic": 5, "toxic|insult": 2}, 7).what
    'rows with several labels are not supported, and 2 of 7 rows have them: toxic|insult'
    >>> wrong_kind({f"{n / 8}": 1 for n in range(40)}, 40).what.partition(":")[0]
    'numbers are not predicted (regression is not supported), and the labels are 35 different decimals in 40 rows'
    >>> wrong_kind({"1.0": 20, "1.5": 20, "2.0": 20, "Food, Drinks": 20}, 80)
    """
    alone = {*rows, *known}
    several = [name for name in rows if _is_several(name, alone)]
    if several:
        num_several = sum(rows[name] for name in several)
        what = f"{num_several:,} of {counted(num_rows, 'row')} {'has' if num_several == 1 else 'have'} them"
        return WrongKind(
            f"rows with several labels are not supported, and {what}: {some_of(several)}",
            "give each row one label; a class whose own name has such a mark needs a name without it",
        )
    decimals = [name for name in rows if is_decimal(name)]
    are_repeated = sum(rows[name] for name in decimals) >= 2 * len(decimals)
    if len(decimals) > MANY or (len(decimals) > 1 and not are_repeated):
        return WrongKind(
            "numbers are not predicted (regression is not supported), and the labels are "
            f"{len(decimals):,} different decimals in {counted(num_rows, 'row')}: {some_of(decimals)}",
            "sort the numbers into a few classes with names; names that look like numbers need a letter before them",
        )
    return None


def doubts(names: Sequence[str], num_rows: int) -> tuple[str, ...]:
    """What is strange about labels that were gathered from the data: decimals, or about as many as rows.

    >>> doubts(["0.5", "1.0", "2.5"], 300)[0].partition(":")[0]
    '3 labels in 300 rows, decimals among them (0.5, 2.5)'
    >>> doubts(["1.0", "2.0"], 300)
    ()
    """
    decimals = [name for name in names if is_decimal(name)]
    few_rows = len(names) >= MANY and num_rows < 2 * len(names)
    if not decimals and not few_rows:
        return ()
    counts = f"{counted(len(names), 'label')} in {counted(num_rows, 'row')}"
    if decimals:
        what = f"{counts}, decimals among them ({some_of(decimals)}): each becomes a class of its own, and numbers "
        return (f"{what}(regression) are not predicted; sort them into a few classes, or {OTHER_COLUMN}",)
    return (f"{counts}: a class for nearly every row, of which little can be learned; take fewer, or {OTHER_COLUMN}",)


def is_decimal(name: str) -> bool:
    """Whether it is a number, with a point or a comma in it, and not a whole one.

    >>> is_decimal("3.75"), is_decimal("3,75"), is_decimal("3.0"), is_decimal("v1.2")
    (True, True, False, False)
    """
    try:
        value = float(name.replace(",", ".", 1))
    except ValueError:
        return False
    return isfinite(value) and not value.is_integer()


def _is_several(name: str, alone: Collection[str]) -> bool:
    """Whether a label is a list, or names with `|` between them, or labels of other rows with a comma between them."""
    if name.startswith("[") and name.endswith("]"):
        return name == "[]" or any(mark in name for mark in "',\"")
    if len(_parts(name, "|")) > 1:
        return True
    return any(len(parts) > 1 and all(part in alone for part in parts) for parts in (_parts(name, m) for m in MARKS))


def _parts(name: str, mark: str) -> list[str]:
    return [part.strip() for part in name.split(mark) if part.strip()]


TASK = SequenceClassification()
