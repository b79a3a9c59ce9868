"""Losses and metrics of scores that a cross-encoder gives candidates of a query.

Scores of a step's candidates are compared query by query: a group's gradient is the same however its candidates are
split among passes, since the comparison sees all scores of the step (`step/joint.py`).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

from vramfit.tasks.base import References
from vramfit.tasks.parts.joint import PLACES, JointLoss, num_places
from vramfit.tasks.parts.losses import Batch, HeadLoss, logits_of
from vramfit.tasks.parts.pooling import Contrast
from vramfit.tasks.parts.vector_metrics import Relevant, pearson, retrieval_scores, spearman


def comparison_of(model: Any) -> Contrast:
    """How candidates are compared, as the task's `learn_by` has kept it."""
    found: Contrast = getattr(model, "_comparison", Contrast(loss="bce", num_texts=1))
    return found


def num_scores(how: Contrast) -> int:
    """Numbers that the loss reads of each candidate."""
    return max(how.num_texts - 1, 1) if how.loss == "margin-mse" else 1


def loss_of_candidates(model: Any, batch: Batch) -> HeadLoss:
    """The loss of a batch of candidates: a mean over candidates, or over queries where those of one are compared."""
    how, num = comparison_of(model), num_places(batch)
    if how.loss == "bce":
        return HeadLoss(
            lambda output, part: [
                F.binary_cross_entropy_with_logits(_scores(output)[:, 0], part["labels"].float(), reduction="sum")
            ],
            lambda part: [int(part[PLACES].shape[0])],
        )

    def of_scores(scores: torch.Tensor, here: Batch) -> torch.Tensor:
        by_query = scores.reshape(-1, how.num_texts)
        if how.loss == "listwise":  # the positive is the first
            return -F.log_softmax(by_query / how.divisor, dim=1)[:, 0].mean()
        margins = here["labels"].reshape(len(by_query), how.num_texts, -1)[:, 0]
        return F.mse_loss(by_query[:, :1] - by_query[:, 1:], margins)

    return HeadLoss(
        lambda output, part: [_scores(output).sum()],
        lambda part: [int(part[PLACES].shape[0])],
        joint=JointLoss(num, 1, {"labels": batch["labels"]}, of_scores, _scores),
    )


def _scores(output: Any) -> torch.Tensor:
    return logits_of(output).float()


class _Gathered:
    """Scores of candidates by query."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int, float, float]] = []

    def update(self, output: Any, batch: Any, references: References) -> None:
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
