"""Metrics of vectors: correlation with scores, and where a search by cosine similarity finds what is relevant.

A search is exact and goes block by block: queries × documents never exists. Documents of equal similarity are ranked in
their order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vramfit.tasks.parts.reading import Reference

QUERIES, DOCUMENTS, PAIRS = 1024, 16_384, 1024
"""Of a block: similarities that exist at once, and relevant documents that are compared with them."""
CUTS = (1, 10, 100)
"""Places that recall is given at."""
TOP = 10
"""Places that nDCG and MRR look at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relevant:
    """Which documents are relevant to which queries, a row each."""

    queries: torch.Tensor
    documents: torch.Tensor
    """Both by number."""
    grades: torch.Tensor
    """Above 0; the gain that nDCG counts."""
    num_queries: int
    """All of them have a relevant document."""


def ranks_of(
    queries: torch.Tensor,
    documents: torch.Tensor,
    relevant: Relevant,
    *,
    skipped: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The place, from 1, of every relevant document among all of them, by cosine similarity to its query.

    Args:
        queries, documents: vectors, a row each, on the host or on the device.
        skipped: for each query, the document that is left out of its search; -1 for none.
        device: where similarities are computed; a block of documents at a time is there.
    """
    ranks = torch.ones(len(relevant.queries), dtype=torch.long)
    order = torch.argsort(relevant.queries, stable=True)
    ends = torch.bincount(relevant.queries, minlength=len(queries)).cumsum(0)
    for begin in range(0, len(queries), QUERIES):
        end = min(begin + QUERIES, len(queries))
        own = order[(int(ends[begin - 1]) if begin else 0) : int(ends[end - 1])]
        block = F.normalize(queries[begin:end].to(device).float(), dim=-1)
        left_out = None if skipped is None else skipped[begin:end].to(device)
        places = (relevant.queries[own].to(device) - begin, relevant.documents[own].to(device))
        similarity = torch.zeros(len(own), device=device)
        for first, scores in _blocks(block, documents, left_out):  # the same blocks twice: bit for bit the same numbers
            inside = (places[1] >= first) & (places[1] < first + scores.shape[1])
            column = (places[1] - first).clamp(0, scores.shape[1] - 1)
            similarity = torch.where(inside, scores[places[0], column], similarity)
        better = torch.zeros(len(own), dtype=torch.long, device=device)
        for first, scores in _blocks(block, documents, left_out):
            better += _num_better(scores, first, places, similarity)
        ranks[own] += better.cpu()
    return ranks


def nearest(
    queries: torch.Tensor, documents: torch.Tensor, num: int, *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Numbers of the nearest documents of each query, the nearest first; as many as there are at most."""
    num = min(num, len(documents))
    found = []
    for begin in range(0, len(queries), QUERIES):
        block = F.normalize(queries[begin : begin + QUERIES].to(device).float(), dim=-1)
        best = torch.zeros(len(block), 0, device=device)
        numbers = torch.zeros(len(block), 0, dtype=torch.long, device=device)
        for first, scores in _blocks(block, documents, None):
            here = torch.arange(first, first + scores.shape[1], device=device).expand(len(block), -1)
            best, chosen = torch.cat([best, scores], 1).topk(min(num, best.shape[1] + scores.shape[1]), dim=1)
            numbers = torch.cat([numbers, here], 1).gather(1, chosen)
        found.append(numbers.cpu())
    return torch.cat(found)


def _blocks(queries: torch.Tensor, documents: torch.Tensor, skipped: torch.Tensor | None) -> Any:
    """The number of a block's first document, and similarities to its documents."""
    for first in range(0, len(documents), DOCUMENTS):
        block = F.normalize(documents[first : first + DOCUMENTS].to(queries.device).float(), dim=-1)
        scores = queries @ block.T
        scores.masked_fill_(scores.isnan(), -torch.inf)  # vectors that are no numbers find nothing, and are not found
        if skipped is not None:
            here = (skipped >= first) & (skipped < first + len(block))
            column = (skipped - first).clamp(0, len(block) - 1)[:, None]
            kept = scores.gather(1, column)
            scores.scatter_(1, column, torch.where(here[:, None], torch.full_like(kept, -torch.inf), kept))
        yield first, scores


def _num_better(
    scores: torch.Tensor, first: int, places: tuple[torch.Tensor, torch.Tensor], similarity: torch.Tensor
) -> torch.Tensor:
    """Documents of a block that come before each relevant one."""
    numbers = torch.arange(first, first + scores.shape[1], device=scores.device)
    found = []
    for begin in range(0, len(similarity), PAIRS):
        part = slice(begin, begin + PAIRS)
        rows, own = scores[places[0][part]], similarity[part, None]
        before = (rows > own) | ((rows == own) & (numbers < places[1][part, None]))
        found.append(before.sum(1))
    return torch.cat(found) if found else torch.zeros_like(places[0])


def retrieval_scores(ranks: torch.Tensor, relevant: Relevant) -> dict[str, float]:
    """nDCG@10 with grades as gains, MRR@10, recall at some places, and MAP over the whole ranking; means over queries.

    Args:
        ranks: as `ranks_of` gives them.
    """
    queries, num_queries = relevant.queries, relevant.num_queries

    def mean(values: torch.Tensor, per_query: torch.Tensor | None = None) -> float:
        total = torch.zeros(num_queries, dtype=torch.double).index_add_(0, queries, values.double())
        return float((total if per_query is None else total / per_query).mean())

    num_relevant = torch.bincount(queries, minlength=num_queries).double()
    gains = torch.where(ranks <= TOP, relevant.grades.double() / torch.log2(ranks.double() + 1), 0.0)
    ideal_place = _places_within(queries, -relevant.grades.double())
    ideal = torch.where(ideal_place <= TOP, relevant.grades.double() / torch.log2(ideal_place.double() + 1), 0.0)
    best_gains = torch.zeros(num_queries, dtype=torch.double).index_add_(0, queries, ideal)
    found_place = _places_within(queries, ranks.double())
    is_first = (found_place == 1) & (ranks <= TOP)
    scores = {
        f"ndcg_at_{TOP}": mean(gains, best_gains),
        f"mrr_at_{TOP}": mean(torch.where(is_first, 1 / ranks.double(), 0.0)),
        "map": mean(found_place / ranks.double(), num_relevant),
    }
    return scores | {f"recall_at_{cut}": mean(ranks <= cut, num_relevant) for cut in CUTS}


def _places_within(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The place, from 1, of each entry among those of its query, the smallest key first."""
    order = torch.argsort(keys, stable=True)
    order = order[torch.argsort(queries[order], stable=True)]
    counts = torch.bincount(queries)
    begins = (counts.cumsum(0) - counts)[queries[order]]
    places = torch.empty_like(order)
    places[order] = torch.arange(1, len(order) + 1) - begins
    return places


def pearson(one: torch.Tensor, other: torch.Tensor) -> float:
    """Pearson's correlation; 0 where one of them does not vary."""
    a, b = one.double() - one.double().mean(), other.double() - other.double().mean()
    below = a.norm() * b.norm()
    return float((a @ b) / below) if below > 0 else 0.0


def spearman(one: torch.Tensor, other: torch.Tensor) -> float:
    """Pearson's correlation of ranks; equal values share the mean of theirs."""
    return pearson(_mean_ranks(one), _mean_ranks(other))


def _mean_ranks(values: torch.Tensor) -> torch.Tensor:
    _, inverse, counts = torch.unique(values.double(), return_inverse=True, return_counts=True)
    means: torch.Tensor = counts.cumsum(0) - (counts.double() - 1) / 2
    return means[inverse]


class VectorMetrics:
    """Keeps the vectors of all texts on the host until the end.

    Each of its kinds gives figures of whole vectors, and beside them, as `dims`, those of vectors cut to some lengths.
    """

    best_metric: str
    higher_is_better = True
    dims: Sequence[int] = ()
    """Lengths that are compared."""

    def __init__(self) -> None:
        self._vectors: list[torch.Tensor] = []
        self._references: list[Reference] = []

    def update(self, output: Any, batch: Any, references: Sequence[Reference]) -> None:
        self._vectors.append(output.embedding.float().cpu())
        self._references += references

    def merge(self, other: "VectorMetrics") -> None:
        self._vectors += other._vectors
        self._references += other._references

    def result(self) -> dict[str, Any]:
        keys = [(reference["index"], reference["place"]) for reference in self._references]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        vectors = torch.cat(self._vectors)[order]
        return at_dims(vectors, lambda made: self.figures(made, [self._references[i] for i in order]), self.dims)

    def figures(self, vectors: torch.Tensor, references: Sequence[Reference]) -> dict[str, float]:
        """The figures of vectors, those of one row after those of another."""
        raise NotImplementedError


def at_dims(vectors: Any, figures: Any, dims: Sequence[int]) -> dict[str, Any]:
    """Figures of vectors; beside them those of vectors cut to each of some lengths."""
    if not dims:
        return dict(figures(vectors))
    cut: Mapping[str, Any] = {str(dim): figures(_cut(vectors, dim)) for dim in dims}
    return {**figures(vectors), "dims": cut}


def _cut(vectors: Any, dim: int) -> Any:
    return tuple(v[:, :dim] for v in vectors) if isinstance(vectors, tuple) else vectors[:, :dim]


class PairScores(VectorMetrics):
    """`spearman` and `pearson` of the cosine similarity of pairs with their scores."""

    best_metric = "spearman"

    def figures(self, vectors: torch.Tensor, references: Sequence[Reference]) -> dict[str, float]:
        units = F.normalize(vectors, dim=-1)
        found = (units[0::2] * units[1::2]).sum(-1)
        scores = torch.tensor([reference["scores"][0] for reference in references[0::2]], dtype=torch.double)
        return {"spearman": spearman(found, scores), "pearson": pearson(found, scores)}


class PairRetrieval(VectorMetrics):
    """Where the positive of each first text is found among all other texts of the data: `mrr_at_10`, `recall_at_1`,
    `recall_at_10`; where there are negatives also `accuracy`: how often the positive is nearer than one of them.

    Equal texts count once. A first text is not found among the others where it is one of them too.
    """

    best_metric = "mrr_at_10"

    def figures(self, vectors: torch.Tensor, references: Sequence[Reference]) -> dict[str, float]:
        num_texts = references[0]["num_texts"]
        texts = [reference["texts"][0] for reference in references]
        queries: dict[str, int] = {}
        documents: dict[str, int] = {}
        pairs: dict[tuple[int, int], None] = {}
        of_query: list[int] = []
        of_document: list[int] = []
        for number, text in enumerate(texts):
            known, of = (documents, of_document) if number % num_texts else (queries, of_query)
            if text not in known:
                known[text] = len(known)
                of.append(number)
            if number % num_texts == 1:
                pairs[queries[texts[number - 1]], documents[text]] = None
        relevant = _relevant(list(pairs), len(queries))
        own = [(number, documents.get(text, -1)) for text, number in queries.items()]
        skipped = torch.tensor([-1 if pair in pairs else pair[1] for pair in own])
        ranks = ranks_of(vectors[of_query], vectors[of_document], relevant, skipped=skipped)
        scores = retrieval_scores(ranks, relevant)
        kept = {name: scores[name] for name in ("mrr_at_10", "recall_at_1", "recall_at_10")}
        return kept | (_accuracy(vectors, num_texts) if num_texts > 2 else {})


def _accuracy(vectors: torch.Tensor, num_texts: int) -> dict[str, float]:
    units = F.normalize(vectors, dim=-1).reshape(-1, num_texts, vectors.shape[1])
    near = torch.einsum("sw,stw->st", units[:, 0], units[:, 1:])
    return {"accuracy": float((near[:, :1] > near[:, 1:]).double().mean())}


class ClassRetrieval(VectorMetrics):
    """Whether texts of a text's class come first among all others: `accuracy_at_1` and `mrr_at_10`.

    Of equal similarity, those of other classes come first.
    """

    best_metric = "accuracy_at_1"

    def figures(self, vectors: torch.Tensor, references: Sequence[Reference]) -> dict[str, float]:
        names = {name: number for number, name in enumerate({r["group"]: None for r in references})}
        classes = torch.tensor([names[reference["group"]] for reference in references])
        ranks = _first_of_class(vectors, classes).double()
        return {
            "accuracy_at_1": float((ranks == 1).double().mean()),
            "mrr_at_10": float(torch.where(ranks <= TOP, 1 / ranks, 0.0).mean()),
        }


def _first_of_class(vectors: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The place, from 1, of the first other text of each text's class."""
    ranks = []
    for begin in range(0, len(vectors), QUERIES):
        own = classes[begin : begin + QUERIES, None]
        block = F.normalize(vectors[begin : begin + QUERIES], dim=-1)
        skipped = torch.arange(begin, begin + len(block))
        best = torch.full((len(block),), -torch.inf)
        for first, scores in _blocks(block, vectors, skipped):
            is_same = classes[first : first + scores.shape[1]] == own
            best = torch.maximum(best, scores.masked_fill(~is_same, -torch.inf).amax(1))
        before = torch.zeros(len(block), dtype=torch.long)
        for first, scores in _blocks(block, vectors, skipped):
            is_same = classes[first : first + scores.shape[1]] == own
            before += ((scores >= best[:, None]) & ~is_same).sum(1)
        ranks.append(1 + before)
    return torch.cat(ranks)


def _relevant(pairs: Sequence[tuple[int, int]], num_queries: int) -> Relevant:
    found = torch.tensor(pairs, dtype=torch.long)
    return Relevant(queries=found[:, 0], documents=found[:, 1], grades=torch.ones(len(pairs)), num_queries=num_queries)
