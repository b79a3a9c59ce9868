"""Metrics of heads that give several labels, numbers, or scores of candidates, kept on the host until the end."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from vramfit.tasks.parts.reading import Reference
from vramfit.tasks.parts.vector_metrics import Relevant, pearson, retrieval_scores, spearman

USUAL_THRESHOLD = 0.5


class KeptLogits:
    """Logits and labels of all samples, whatever order they come in."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._logits: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []

    def update(self, output: Any, batch: Any, references: Sequence[Reference]) -> None:
        self._logits.append(output.logits.float().cpu())
        self._labels.append(batch["labels"].float().cpu())

    def merge(self, other: "KeptLogits") -> None:
        self._logits += other._logits
        self._labels += other._labels

    def _all(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat(self._logits).double(), torch.cat(self._labels).double()


class LabelMetrics(KeptLogits):
    """`micro_f1`, `macro_f1`, `exact_match`, `loss`; beside them `label_f1`, that of each label, and `thresholds`.

    A label that neither is true nor is given anywhere has no F1.

    Args:
        thresholds: from which probability on each label is given; none chooses those that are best for this data.
    """

    best_metric = "micro_f1"
    higher_is_better = True

    def __init__(self, names: Sequence[str], thresholds: Sequence[float] = ()) -> None:
        super().__init__(names)
        self._thresholds = tuple(thresholds)

    def result(self) -> dict[str, Any]:
        logits, labels = self._all()
        probabilities, is_true = logits.float().sigmoid(), labels > 0.5
        least = self._thresholds or [best_threshold(p, t) for p, t in zip(probabilities.T, is_true.T, strict=True)]
        is_given = probabilities >= torch.tensor(least, dtype=torch.float)
        both = (is_given & is_true).sum(0).double()
        either = (is_given.sum(0) + is_true.sum(0)).double()
        f1 = {name: float(2 * b / e) for name, b, e in zip(self._names, both, either, strict=True) if e}
        return {
            "micro_f1": float(2 * both.sum() / either.sum()) if either.sum() else 0.0,
            "macro_f1": sum(f1.values()) / len(f1) if f1 else 0.0,
            "exact_match": float((is_given == is_true).all(1).double().mean()),
            "loss": float(F.binary_cross_entropy_with_logits(logits, labels)),
            "label_f1": f1,
            "thresholds": dict(zip(self._names, map(float, least), strict=True)),
        }


def best_threshold(probabilities: torch.Tensor, is_true: torch.Tensor) -> float:
    """The probability from which on a label is given for the best F1: half-way between two that occur.

    Of several that are as good, the one nearest to a half; a half where the label never is true.

    >>> round(best_threshold(torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.tensor([False, False, True, True])), 2)
    0.25
    """
    if not bool(is_true.any()):
        return USUAL_THRESHOLD
    values, order = probabilities.double().sort(descending=True)
    right = is_true[order].double().cumsum(0)
    f1 = 2 * right / (torch.arange(1, len(values) + 1) + is_true.sum())
    below = torch.cat([values[1:], values.new_full((1,), -1.0)])
    can_cut = values > below  # equal ones are given together
    middles = torch.where(below >= 0, (values + below) / 2, values / 2)
    best = can_cut & (f1 >= f1[can_cut].max())
    found = middles[best]
    held = (below[best] < USUAL_THRESHOLD) & (values[best] >= USUAL_THRESHOLD)
    if bool(held.any()):
        return USUAL_THRESHOLD
    return float(found[(found - USUAL_THRESHOLD).abs().argmin()])


class NumberMetrics(KeptLogits):
    """`mse`, `mae`, `pearson`, `spearman`: of several numbers a row their means, and `values`, each's own."""

    best_metric = "mse"
    higher_is_better = False

    def result(self) -> dict[str, Any]:
        logits, labels = self._all()
        rows = len(logits)
        found, true = logits.reshape(rows, -1), labels.reshape(rows, -1)
        each = [_figures(f, t) for f, t in zip(found.T, true.T, strict=True)]
        figures = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
        figures["loss"] = figures["mse"]
        return figures if len(each) == 1 else figures | {"values": dict(zip(self._names, each, strict=True))}


def _figures(found: torch.Tensor, true: torch.Tensor) -> dict[str, float]:
    off = found - true
    return {
        "mse": float((off * off).mean()),
        "mae": float(off.abs().mean()),
        "pearson": pearson(found, true),
        "spearman": spearman(found, true),
    }


class _Gathered:
    """Scores of candidates by query."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int, float, float]] = []

    def update(self, output: Any, batch: Any, references: Sequence[Reference]) -> None:
        scores = output.logits[:, 0].float().tolist()
        for score, reference in zip(scores, references, strict=True):
            truth = reference.get("scores")
            is_first = float(reference["place"] == 0)
            known = is_first if truth is None or reference["num_texts"] > 1 else truth[0]
            self._found.append((reference["index"], reference["place"], score, known))

    def merge(self, other: "_Gathered") -> None:
        self._found += other._found


class RankedCandidates(_Gathered):
    """Where the positive is found among the candidates of its query; after those that have the same score, or none."""

    best_metric = "mrr_at_10"
    higher_is_better = True

    def result(self) -> dict[str, float]:
        by_query: dict[int, list[tuple[int, float, float]]] = {}
        for query, place, score, known in self._found:
            by_query.setdefault(query, []).append((place, score, known))
        queries, ranks, grades = [], [], []
        for number, candidates in enumerate(by_query.values()):
            ordered = sorted(candidates, key=lambda one: (math.inf if math.isnan(one[1]) else -one[1], -one[0]))
            for rank, (_, _, known) in enumerate(ordered, 1):
                if known > 0:
                    queries.append(number)
                    ranks.append(rank)
                    grades.append(known)
        numbers = torch.tensor(queries)
        relevant = Relevant(queries=numbers, documents=numbers, grades=torch.tensor(grades), num_queries=len(by_query))
        return retrieval_scores(torch.tensor(ranks), relevant)


class ScoredPairs(_Gathered):
    """How well scores follow those of the data."""

    best_metric = "spearman"
    higher_is_better = True

    def result(self) -> dict[str, float]:
        given = torch.tensor([known for *_, known in self._found])
        found = torch.tensor([score for _, _, score, _ in self._found])
        loss = F.binary_cross_entropy_with_logits(found, given)
        return {"spearman": spearman(found, given), "pearson": pearson(found.sigmoid(), given), "loss": float(loss)}
