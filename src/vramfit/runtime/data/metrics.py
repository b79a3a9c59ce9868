"""Metrics that run along: sums on the host, never a pile of logits on the GPU."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from vramfit.errors import WorkloadError
from vramfit.runtime.data.answers import Answer, read_answers, scores
from vramfit.runtime.data.classes import ClassCounts
from vramfit.runtime.data.entities import OUTSIDE, EntityCounts, are_spans
from vramfit.runtime.data.samples import Samples
from vramfit.step.inputs import Batch
from vramfit.techniques.packing import IGNORED

MASKED_CHUNK = 256
"""Masked tokens whose logits, one for each word of the vocabulary, are looked at together."""


class RunningMetrics(Protocol):
    """Takes the outputs of batches in any order and split in any way; `result` is the same."""

    best_metric: str
    """Which result decides what is best."""
    higher_is_better: bool

    def update(self, output: Any, batch: Batch, references: Sequence[dict[str, Any]]) -> None:
        """Adds a batch.

        Args:
            output: with logits, on any device.
            batch: with its labels, on any device.
            references: of its samples, in its order.
        """
        ...

    def merge(self, other: Any) -> None:
        """Adds what another one of this kind was given."""
        ...

    def result(self) -> dict[str, float]:
        """Name → figure, over all that was added."""
        ...


def make_metrics(samples: Samples) -> RunningMetrics:
    """The metrics of a data set's task.

    Raises:
        WorkloadError: the samples have no labels.
    """
    first = samples.references[0]
    if any(key in first and first[key] is None for key in ("label", "tags", "answers")):
        raise WorkloadError(["the data has no labels, so there is nothing to measure against"])
    if samples.task == "sequence-classification":
        return ClassMetrics(len(samples.label_names))
    if samples.task == "token-classification":
        return TagMetrics(samples.label_names)
    return AnswerMetrics() if samples.task == "question-answering" else MaskedMetrics()


class _Loss:
    """A mean over everything that has a label."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, losses: torch.Tensor) -> None:
        values = losses.double().cpu().tolist()
        self.total += sum(values)
        self.count += len(values)

    def merge(self, other: "_Loss") -> None:
        self.total += other.total
        self.count += other.count

    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels.to(logits.device), reduction="none")


class ClassMetrics:
    """Sequence classification: `accuracy`, `macro_f1`, `loss`; with two classes also `f1` of the second and `mcc`."""

    best_metric = "accuracy"
    higher_is_better = True

    def __init__(self, num_labels: int) -> None:
        self._counts = ClassCounts(num_labels)
        self._loss = _Loss()

    def update(self, output: Any, batch: Batch, references: Sequence[dict[str, Any]]) -> None:
        labels = batch["labels"]
        self._loss.add(_losses(output.logits, labels))
        self._counts.add(labels.tolist(), output.logits.argmax(-1).tolist())

    def merge(self, other: "ClassMetrics") -> None:
        self._counts.merge(other._counts)
        self._loss.merge(other._loss)

    def result(self) -> dict[str, float]:
        return self._counts.scores() | {"loss": self._loss.mean()}


class TagMetrics:
    """Token classification: entity `precision`, `recall` and `f1`, word `accuracy`, `loss`.

    A word that was cut off counts as found to be outside of everything: what truncation loses is not hidden. Where the
    tags mark no spans (parts of speech), there is the accuracy only.
    """

    higher_is_better = True

    def __init__(self, label_names: Sequence[str]) -> None:
        self._names = list(label_names)
        self._has_spans = are_spans(label_names)
        self.best_metric = "f1" if self._has_spans else "accuracy"
        self._counts = EntityCounts()
        self._loss = _Loss()

    def update(self, output: Any, batch: Batch, references: Sequence[dict[str, Any]]) -> None:
        labels = batch["labels"].to(output.logits.device)
        labelled = labels != IGNORED
        self._loss.add(_losses(output.logits[labelled], labels[labelled]))
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


class AnswerMetrics:
    """Question answering: `exact_match` and `f1` as SQuAD's scripts give them, of 100; `loss`.

    Windows of one context are merged: the best answer of them counts. Silence is an answer only where some questions
    have none (SQuAD 2.0): it wins where it scores higher than any span.
    """

    best_metric = "f1"
    higher_is_better = True

    def __init__(self) -> None:
        self._answers: dict[int, Answer] = {}
        self._gold: dict[int, list[str]] = {}
        self._loss = _Loss()

    def update(self, output: Any, batch: Batch, references: Sequence[dict[str, Any]]) -> None:
        start = _losses(output.start_logits, batch["start_positions"])
        self._loss.add((start + _losses(output.end_logits, batch["end_positions"])) / 2)
        for answer, reference in zip(read_answers(output, references), references, strict=True):
            self._take(reference["question_number"], answer, reference["answers"])

    def merge(self, other: "AnswerMetrics") -> None:
        for number, answer in other._answers.items():
            self._take(number, answer, other._gold[number])
        self._loss.merge(other._loss)

    def _take(self, number: int, answer: Answer, gold: list[str]) -> None:
        known = self._answers.get(number)
        self._answers[number] = answer if known is None else known.or_better(answer)
        self._gold[number] = gold

    def result(self) -> dict[str, float]:
        may_be_silent = any(not gold for gold in self._gold.values())
        exact = shared = 0.0
        for number, answer in self._answers.items():
            text = "" if may_be_silent and answer.no_answer_score > answer.score else answer.text
            match, overlap = scores(text, self._gold[number], may_be_silent=may_be_silent)
            exact += match
            shared += overlap
        count = max(len(self._answers), 1)
        return {"exact_match": 100 * exact / count, "f1": 100 * shared / count, "loss": self._loss.mean()}


class MaskedMetrics:
    """Masked language modelling: `loss`, `perplexity`, and the `accuracy` on masked tokens."""

    best_metric = "loss"
    higher_is_better = False

    def __init__(self) -> None:
        self._loss = _Loss()
        self._num_right = 0

    def update(self, output: Any, batch: Batch, references: Sequence[dict[str, Any]]) -> None:
        for logits, labels in zip(output.logits, batch["labels"].to(output.logits.device), strict=True):
            for places in (labels != IGNORED).nonzero()[:, 0].split(MASKED_CHUNK):
                chosen, true = logits[places], labels[places]
                self._loss.add(_losses(chosen, true))
                self._num_right += int((chosen.argmax(-1) == true).sum())

    def merge(self, other: "MaskedMetrics") -> None:
        self._loss.merge(other._loss)
        self._num_right += other._num_right

    def result(self) -> dict[str, float]:
        loss = self._loss.mean()
        accuracy = self._num_right / self._loss.count if self._loss.count else 0.0
        perplexity = float(torch.tensor(loss, dtype=torch.float64).exp())
        return {"loss": loss, "perplexity": perplexity, "accuracy": accuracy}
