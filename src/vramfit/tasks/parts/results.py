"""What comes of a model's outputs: metrics that run along, as sums on the host, and scores in rows of predictions."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, Protocol

from vramfit.tasks import all_tasks, find_task
from vramfit.tasks.parts.reading import Reference

if TYPE_CHECKING:
    import torch

    Batch = dict[str, torch.Tensor]


class RunningMetrics(Protocol):
    """Takes the outputs of batches in any order and split in any way; `result` is the same."""

    best_metric: str
    """Which result decides what is best."""
    higher_is_better: bool

    def update(self, output: Any, batch: "Batch", references: Sequence[Reference]) -> None:
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


class MeanLoss:
    """A mean over everything that has a label."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, losses: "torch.Tensor") -> None:
        """Some more of them."""
        values = losses.double().cpu().tolist()
        self.total += sum(values)
        self.count += len(values)

    def merge(self, other: "MeanLoss") -> None:
        """Those of another one."""
        self.total += other.total
        self.count += other.count

    def mean(self) -> float:
        """0 of nothing."""
        return self.total / self.count if self.count else 0.0


def class_losses(logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
    """The cross entropy of each label, in fp32."""
    import torch.nn.functional as F

    return F.cross_entropy(logits.float(), labels.to(logits.device), reduction="none")


class ClassCounts:
    """A confusion matrix that grows."""

    def __init__(self, num_labels: int) -> None:
        self._num_labels = num_labels
        self._pairs: Counter[tuple[int, int]] = Counter()
        """(true, said) → how often."""

    def add(self, true: Iterable[int], said: Iterable[int]) -> None:
        """Some more samples."""
        self._pairs.update(zip(true, said, strict=True))

    def merge(self, other: "ClassCounts") -> None:
        """The samples of another one."""
        self._pairs.update(other._pairs)

    def scores(self) -> dict[str, float]:
        """`accuracy`, `macro_f1` over the classes that occur; with two classes `f1` of the second and `mcc`."""
        total = sum(self._pairs.values())
        right = sum(count for (true, said), count in self._pairs.items() if true == said)
        seen = sorted({label for pair in self._pairs for label in pair})
        macro = sum(self._f1(label) for label in seen) / len(seen) if seen else 0.0
        scores = {"accuracy": right / total if total else 0.0, "macro_f1": macro}
        return scores | {"f1": self._f1(1), "mcc": self._mcc()} if self._num_labels == 2 else scores

    def _f1(self, label: int) -> float:
        right = self._pairs[label, label]
        either = sum(c * ((true == label) + (said == label)) for (true, said), c in self._pairs.items())
        return 2 * right / either if either else 0.0

    def _mcc(self) -> float:
        """Matthews' correlation of two classes; 0 where one of them never occurs."""
        yes, no = self._pairs[1, 1], self._pairs[0, 0]
        false_yes, false_no = self._pairs[0, 1], self._pairs[1, 0]
        below = (yes + false_yes) * (yes + false_no) * (no + false_yes) * (no + false_no)
        return (yes * no - false_yes * false_no) / sqrt(below) if below else 0.0


def place_of(reference: Reference) -> dict[str, Any]:
    """Where a sample is in its file; a request of a server has no more than a number."""
    return {name: reference[name] for name in ("row", "index") if name in reference}


def rounded(score: float) -> float:
    """A score in six significant digits, which is what fp32 leaves of it."""
    return float(f"{score:.6g}")


def best_scores(
    values: Sequence[float], places: Sequence[int], names: Sequence[str], top_k: int
) -> list[dict[str, Any]]:
    """The best labels of one text or word."""
    best = list(zip(places, values, strict=True))[:top_k]
    return [{"label": names[place], "probability": rounded(value)} for place, value in best]


def best_labels(logits: "torch.Tensor", references: Sequence[Reference]) -> tuple[list[Any], list[Any]]:
    """Probabilities and places of the best labels, the best first: as many as any of the samples asks for."""
    most = max((reference.get("top_k") or 1 for reference in references), default=1)
    probabilities = logits.float().softmax(-1)
    if most == 1:
        values, places = probabilities.max(-1, keepdim=True)
    else:
        values, places = probabilities.topk(min(most, logits.shape[-1]), -1)
    return values.tolist(), places.tolist()


def wrong_top_k(top_k: Any, task: str | None = None) -> str | None:
    """Why so many scores cannot be given; None where they can.

    Args:
        task: of the model, where it is known.

    >>> wrong_top_k(0)
    'top_k 0 is not a whole number from 1'
    >>> wrong_top_k(3, "sequence-classification")
    """
    if type(top_k) is not int or top_k < 1:
        return f"top_k {str(top_k)[:40]} is not a whole number from 1"
    if task is None:
        return None
    most = find_task(task).max_scores
    if most is None:
        scored = [one.name for one in all_tasks() if one.max_scores is not None]
        return f"top_k is not for {task}: {', '.join(scored)} have scores to choose from"
    return f"top_k {top_k} is more than the {most:,} scores that are given for {task}" if top_k > most else None
