"""Toy: a number for a text, as a task of one file; no part of vramfit, and put beside it by `test_toy_task.py`."""

from collections.abc import Sequence
from typing import Any

from vramfit.tasks.base import BatchRows, References, Rows, Task
from vramfit.tasks.parts.reading import BadValue, Columns, LabelNames, Reference, Row, Tokenizing, text_in
from vramfit.tasks.parts.results import MeanLoss, place_of, rounded


class ToyScore(Task):
    """See the module."""

    name = "toy-score"
    title = "Toy score"
    auto_class = "AutoModelForSequenceClassification"
    is_trained = is_served = True
    pools_sequences = counts_samples = True
    label_columns = ("score",)
    truth = "label"
    learns_numbers = True

    def num_labels(self, names: Sequence[str] = ()) -> int:
        return 1

    def meta_labels(self, model: Any, batch: int, seq: int, device: Any) -> Any:
        import torch

        return {"labels": torch.zeros(batch, device=device)}

    def loss(self, model: Any, batch: Any) -> Any:
        """The absolute error, which no head of transformers learns from: so it is seen whose loss was taken."""
        from vramfit.tasks.parts.losses import HeadLoss

        return HeadLoss(
            lambda output, batch: [(output.logits.squeeze(-1) - batch["labels"]).abs().sum()],
            lambda batch: [len(batch["labels"])],
        )

    def read_row(self, row: Row, columns: Columns, labels: LabelNames) -> Reference:
        known: Reference = {"texts": (text_in(row, columns.texts[0]),), "label": None}
        if columns.label is None:
            return known
        try:
            return known | {"label": float(row.fields[columns.label])}
        except (KeyError, TypeError, ValueError):
            raise BadValue(f"{columns.label} is no number") from None

    def batch_labels(self, batch: Any, rows: BatchRows, hiding: Any) -> Any:
        return {"labels": rows.labels.column(rows.indices, 0)} if rows.are_labelled else {}

    def metrics(self, how: Tokenizing, references: References) -> "AbsoluteError":
        return AbsoluteError()

    def predictions(self, output: Any, batch: Any, references: References, how: Tokenizing) -> Rows:
        scores = output.logits.float().squeeze(-1).tolist()
        return [place_of(r) | {"score": rounded(score)} for r, score in zip(references, scores, strict=True)]


class AbsoluteError:
    """`mean_absolute_error`."""

    best_metric = "mean_absolute_error"
    higher_is_better = False

    def __init__(self) -> None:
        self._error = MeanLoss()

    def update(self, output: Any, batch: Any, references: References) -> None:
        self._error.add((output.logits.squeeze(-1).cpu() - batch["labels"].cpu()).abs())

    def merge(self, other: "AbsoluteError") -> None:
        self._error.merge(other._error)

    def result(self) -> dict[str, float]:
        return {"mean_absolute_error": self._error.mean()}


TASK = ToyScore()
