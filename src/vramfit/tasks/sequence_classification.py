"""Sequence classification: one class for a text or a pair of texts."""

from collections.abc import Sequence
from typing import Any

from vramfit.errors import DataError
from vramfit.tasks.base import SINGLE_TEXTS, BatchRows, Task, zeros
from vramfit.tasks.parts import label_kinds
from vramfit.tasks.parts.encoding import Tokenizing
from vramfit.tasks.parts.reading import Columns, LabelNames, Reference, Row, some_of, text_in
from vramfit.tasks.parts.results import (
    ClassCounts,
    MeanLoss,
    best_labels,
    best_scores,
    class_losses,
    place_of,
    rounded,
)

PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("question", "sentence"),
    ("question", "context"),
)


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

    def class_names(self, labels: LabelNames, references: Sequence[Reference]) -> tuple[str, ...]:
        return labels.names(r["label"] for r in references if r["label"] is not None)

    def check_labels(self, file: str, labels: LabelNames, num_rows: int, *, has_others: bool) -> None:
        wrong = label_kinds.wrong_kind(labels.new, num_rows, labels.known)
        if wrong is None:
            return
        hint = f"give data with the labels that are known: {some_of(labels.known)}" if labels.are_given else wrong.hint
        raise DataError(
            f"{file}: {wrong.what}", file=file, hint=f"{hint}; or {label_kinds.OTHER_COLUMN}" if has_others else hint
        )

    def notes(self, labels: LabelNames, names: Sequence[str], num_rows: int) -> tuple[str, ...]:
        return labels.notes if labels.are_given else label_kinds.doubts(names, num_rows)

    def batch_labels(self, batch: Any, rows: BatchRows, hiding: Any) -> Any:
        return {"labels": rows.labels.column(rows.indices, 0)} if rows.are_labelled else {}

    def metrics(self, label_names: Sequence[str]) -> "ClassMetrics":
        return ClassMetrics(len(label_names))

    def predictions(
        self, output: Any, batch: Any, references: Sequence[Reference], how: Tokenizing
    ) -> list[dict[str, Any]]:
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

    def update(self, output: Any, batch: Any, references: Sequence[Reference]) -> None:
        """Adds a batch."""
        labels = batch["labels"]
        self._loss.add(class_losses(output.logits, labels))
        self._counts.add(labels.tolist(), output.logits.argmax(-1).tolist())

    def merge(self, other: "ClassMetrics") -> None:
        """Adds what another one was given."""
        self._counts.merge(other._counts)
        self._loss.merge(other._loss)

    def result(self) -> dict[str, float]:
        """Over all that was added."""
        return self._counts.scores() | {"loss": self._loss.mean()}


TASK = SequenceClassification()
