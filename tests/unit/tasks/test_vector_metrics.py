"""Metrics of vectors: worked out by hand, and beside the evaluators of sentence-transformers."""

from math import log2
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vramfit.tasks.parts import vector_metrics
from vramfit.tasks.parts.vector_metrics import (
    ClassRetrieval,
    PairRetrieval,
    PairScores,
    Relevant,
    VectorMetrics,
    pearson,
    ranks_of,
    retrieval_scores,
    spearman,
)


def relevant_of(*rows: tuple[int, int, float], num_queries: int) -> Relevant:
    queries, documents, grades = zip(*rows, strict=True)
    return Relevant(
        queries=torch.tensor(queries),
        documents=torch.tensor(documents),
        grades=torch.tensor(grades, dtype=torch.double),
        num_queries=num_queries,
    )


def test_scores_of_a_ranking_are_those_worked_out_by_hand() -> None:
    relevant = relevant_of((0, 5, 3), (0, 1, 1), (0, 2, 2), (1, 0, 1), (2, 4, 1), num_queries=3)
    ranks = torch.tensor([2, 4, 200, 1, 11])
    scores = retrieval_scores(ranks, relevant)
    dcg = 3 / log2(3) + 1 / log2(5)
    ideal = 3 / log2(2) + 2 / log2(3) + 1 / log2(4)
    assert scores["ndcg_at_10"] == pytest.approx((dcg / ideal + 1 + 0) / 3, abs=1e-12)
    assert scores["mrr_at_10"] == pytest.approx((1 / 2 + 1 + 0) / 3, abs=1e-12)
    assert scores["recall_at_1"] == pytest.approx((0 + 1 + 0) / 3, abs=1e-12)
    assert scores["recall_at_10"] == pytest.approx((2 / 3 + 1 + 0) / 3, abs=1e-12)
    assert scores["recall_at_100"] == pytest.approx((2 / 3 + 1 + 1) / 3, abs=1e-12)
    assert scores["map"] == pytest.approx(((1 / 2 + 2 / 4 + 3 / 200) / 3 + 1 + 1 / 11) / 3, abs=1e-12)


def test_more_relevant_documents_than_ndcg_looks_at_have_an_ideal_of_ten() -> None:
    relevant = relevant_of(*((0, n, 1.0) for n in range(15)), num_queries=1)
    assert retrieval_scores(torch.arange(1, 16), relevant)["ndcg_at_10"] == pytest.approx(1)


def test_documents_of_equal_similarity_are_ranked_in_their_order() -> None:
    documents = torch.tensor([[1.0, 0], [0, 1], [2, 0], [1, 0]])
    relevant = relevant_of((0, 2, 1), (0, 3, 1), (1, 1, 1), num_queries=2)
    assert ranks_of(torch.tensor([[5.0, 0], [0, 1]]), documents, relevant).tolist() == [2, 3, 1]


def test_a_document_can_be_left_out_of_a_querys_search() -> None:
    documents = torch.eye(3)
    relevant = relevant_of((0, 1, 1), num_queries=1)
    query = torch.tensor([[1.0, 0.5, 0]])
    assert ranks_of(query, documents, relevant).tolist() == [2]
    assert ranks_of(query, documents, relevant, skipped=torch.tensor([0])).tolist() == [1]


def test_blocks_of_any_size_give_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    queries, documents = torch.randn(23, 8, generator=draw), torch.randn(57, 8, generator=draw)
    pairs = [(q, d, 1.0) for q in range(23) for d in range(57) if (q * d) % 11 == 3] + [(q, 0, 1.0) for q in range(23)]
    relevant = relevant_of(*pairs, num_queries=23)
    skipped = torch.randint(-1, 57, (23,), generator=draw)
    similar = F.normalize(queries, dim=-1) @ F.normalize(documents, dim=-1).T
    for query, document in enumerate(skipped.tolist()):
        if document >= 0:
            similar[query, document] = -torch.inf
    places = similar.argsort(dim=1, descending=True, stable=True).argsort(dim=1) + 1
    expected = [int(places[q, d]) for q, d, _ in pairs]
    assert ranks_of(queries, documents, relevant, skipped=skipped).tolist() == expected
    for name, size in (("QUERIES", 5), ("DOCUMENTS", 10), ("PAIRS", 3)):
        monkeypatch.setattr(vector_metrics, name, size)
    assert ranks_of(queries, documents, relevant, skipped=skipped).tolist() == expected


def test_similarities_are_never_all_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUERIES", "DOCUMENTS", "PAIRS"):
        monkeypatch.setattr(vector_metrics, name, 16)
    vectors = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    relevant = relevant_of(*((n, (n + 1) % 64, 1.0) for n in range(64)), num_queries=64)
    sizes = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            sizes.append(made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    with Seen():
        ranks_of(vectors, vectors, relevant)
    assert max(sizes) <= 16 * 16


def test_correlations_are_those_worked_out_by_hand() -> None:
    one, other = torch.tensor([1.0, 2, 2, 4]), torch.tensor([10.0, 20, 30, 25])
    # ranks 1, 2.5, 2.5, 4 and 1, 2, 4, 3: products of deviations 2.25 + 0 + 0 + 0.75, squares 4.5 and 5
    assert spearman(one, other) == pytest.approx(3.0 / (4.5 * 5) ** 0.5, abs=1e-12)
    assert pearson(one, torch.tensor([2.0, 4, 4, 8])) == pytest.approx(1, abs=1e-12)
    assert pearson(one, torch.tensor([3.0, 3, 3, 3])) == 0


def test_scored_pairs_are_as_sentence_transformers_has_them() -> None:
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    vectors = torch.randn(80, 12, generator=torch.Generator().manual_seed(1))
    scores = [float(n % 6) for n in range(40)]

    class Ours(evaluation.EmbeddingSimilarityEvaluator):  # type: ignore[name-defined,misc]
        def embed_inputs(self, model: Any, sentences: list[str], **more: Any) -> Any:
            return vectors[[int(text) for text in sentences]].numpy()

        def store_metrics_in_model_card_data(self, *args: Any, **more: Any) -> None:
            pass

    texts = [str(n) for n in range(80)]
    theirs = Ours(texts[0::2], texts[1::2], scores, similarity_fn_names=["cosine"], write_csv=False)(None)
    metrics = PairScores()
    feed(metrics, vectors, [{"scores": (scores[n // 2],)} for n in range(80)])
    found = metrics.result()
    assert found["spearman"] == pytest.approx(theirs["spearman_cosine"], abs=1e-6)
    assert found["pearson"] == pytest.approx(theirs["pearson_cosine"], abs=1e-6)


def test_a_search_is_as_sentence_transformers_has_it() -> None:
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    draw = torch.Generator().manual_seed(2)
    queries, documents = torch.randn(30, 6, generator=draw), torch.randn(120, 6, generator=draw)
    found = {q: set(torch.randperm(120, generator=draw)[: 1 + q % 4].tolist()) for q in range(30)}
    places = {f"q{q}": queries[q] for q in range(30)} | {f"d{d}": documents[d] for d in range(120)}

    class Ours(evaluation.InformationRetrievalEvaluator):  # type: ignore[name-defined,misc]
        def embed_inputs(self, model: Any, sentences: list[str], **more: Any) -> Any:
            return torch.stack([places[text] for text in sentences])

    theirs = Ours(
        {f"q{q}": f"q{q}" for q in range(30)},
        {f"{d:03}": f"d{d}" for d in range(120)},
        {f"q{q}": {f"{d:03}" for d in of} for q, of in found.items()},
        precision_recall_at_k=[1, 10, 100],
        map_at_k=[120],
        score_functions={"cos": lambda a, b: F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T},
    ).compute_metrices(None)["cos"]
    relevant = relevant_of(*((q, d, 1.0) for q, of in found.items() for d in of), num_queries=30)
    ours = retrieval_scores(ranks_of(queries, documents, relevant), relevant)
    assert ours["ndcg_at_10"] == pytest.approx(theirs["ndcg@k"][10], abs=1e-9)
    assert ours["mrr_at_10"] == pytest.approx(theirs["mrr@k"][10], abs=1e-9)
    assert ours["map"] == pytest.approx(theirs["map@k"][120], abs=1e-9)
    for cut in (1, 10, 100):
        assert ours[f"recall_at_{cut}"] == pytest.approx(theirs["recall@k"][cut], abs=1e-9)


def feed(metrics: VectorMetrics, vectors: torch.Tensor, more: list[dict[str, Any]], num_texts: int = 2) -> None:
    """Texts one by one, the last first: the order must not matter."""
    for n in reversed(range(len(vectors))):
        reference = {"index": n // num_texts, "place": n % num_texts, "num_texts": num_texts, "texts": (str(n),)}
        metrics.update(SimpleNamespace(embedding=vectors[n : n + 1]), {}, [reference | more[n]])


def test_positives_are_sought_among_all_other_texts_and_equal_ones_count_once() -> None:
    texts = ["a", "b", "n", "c", "b", "n", "d", "a", "m"]  # a is a query and d's positive
    places = {"a": [1.0, 0.1, 0], "b": [1, 0, 0], "c": [0, 1, 0], "d": [1, 0, 1], "n": [0.9, 0, 0.3], "m": [0, 0, -1]}
    vectors = torch.tensor([places[text] for text in texts])
    metrics = PairRetrieval()
    feed(metrics, vectors, [{"texts": (text,)} for text in texts], num_texts=3)
    # documents b, n, a, m; a finds b first (a itself is left out); c finds b after a, beside n; d finds a after n and b
    found = metrics.result()
    assert found["mrr_at_10"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert found["recall_at_1"] == pytest.approx(1 / 3)
    assert found["recall_at_10"] == 1
    assert found["accuracy"] == pytest.approx(2 / 3)  # c is as far from b as from n


def test_a_text_of_the_same_class_is_sought_among_all_others() -> None:
    vectors = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1], [0.95, 0.05]])
    metrics = ClassRetrieval()
    feed(metrics, vectors, [{"group": g} for g in "xxyy"], num_texts=1)
    # nearest first: 0: 3, 1, 2; 1: 3, 0, 2; 2: 1, 3, 0; 3: 0 or 1 before 2
    assert metrics.result() == {"accuracy_at_1": 0.0, "mrr_at_10": pytest.approx((1 / 2 + 1 / 2 + 1 / 2 + 1 / 3) / 4)}


def test_parts_of_an_evaluation_are_merged_and_cut_vectors_stand_beside() -> None:
    vectors = torch.randn(20, 6, generator=torch.Generator().manual_seed(3))
    whole, one, other = PairScores(), PairScores(), PairScores()
    references = [{"index": n // 2, "place": n % 2, "num_texts": 2, "scores": (float(n // 2),)} for n in range(20)]
    for metrics, rows in ((whole, range(20)), (one, range(3, 20)), (other, range(3))):
        metrics.update(SimpleNamespace(embedding=vectors[list(rows)]), {}, [references[n] for n in rows])
    one.merge(other)
    assert one.result() == whole.result()
    whole.dims = (6, 2)
    found = whole.result()
    assert found["dims"]["6"] == one.result()
    short = PairScores()
    short.update(SimpleNamespace(embedding=vectors[:, :2]), {}, references)
    assert found["dims"]["2"] == short.result()


def test_vectors_that_are_no_numbers_are_not_found() -> None:
    queries, documents = torch.eye(3), torch.eye(3)
    documents[1] = queries[2] = torch.nan
    relevant = relevant_of((0, 0, 1.0), (1, 1, 1.0), (2, 2, 1.0), num_queries=3)
    assert ranks_of(queries, documents, relevant).tolist() == [1, 3, 3]
