"""A search by a model's vectors, from files to figures, beside sentence-transformers with the same model."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.unit.models.sentence_folders import write_folder, write_json
from tests.unit.runtime.training.small_runs import BAD, GOOD, PLAIN, write_model

from vramfit.errors import WorkloadError
from vramfit.runtime.device import RunDevice
from vramfit.runtime.retrieval import Collection, CollectionFiles, Search, read_collection
from vramfit.runtime.trained import open_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("search") / "source")


def collection(folder: Path) -> Collection:
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choice((*GOOD, *BAD, *PLAIN)) for _ in range(draw.randint(1, 9)))

    queries = [{"id": f"q{n}", "text": text()} for n in range(12)]
    documents = [{"id": f"d{n:02}", "text": text()} for n in range(40)]
    rows = {(q, d) for q in range(12) for d in draw.sample(range(40), draw.randint(1, 5))}
    relevant = [{"query_id": f"q{q}", "document_id": f"d{d:02}"} for q, d in sorted(rows)]
    paths = {}
    for name, content in (("queries", queries), ("documents", documents), ("relevant", relevant)):
        paths[name] = str(folder / f"{name}.jsonl")
        Path(paths[name]).write_text("".join(json.dumps(row) + "\n" for row in content))
    return read_collection(CollectionFiles(**paths, task="embedding"))


def figures(model: Path, found: Collection, dims: tuple[int, ...] = ()) -> dict[str, Any]:
    trained, run_device = open_model(str(model), task="embedding"), RunDevice("cpu")
    search = Search(trained, found)
    inference = trained.load(run_device, search.longest)
    return search.figures(inference, run_device, dims, lambda done, total: None)


def test_a_search_gives_what_sentence_transformers_gives(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "prompted", "Normalize")
    prompts = {"query": "anna ", "document": "the film ", "other": "tom "}
    write_json(model / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "other"})
    package = pytest.importorskip("sentence_transformers")
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    found = collection(tmp_path)
    evaluator = evaluation.InformationRetrievalEvaluator(
        {q["id"]: q["texts"][0] for q in found.queries},
        {d["id"]: d["texts"][0] for d in found.documents},
        {
            q["id"]: {found.documents[d]["id"] for own, d, _ in found.relevant if own == n}
            for n, q in enumerate(found.queries)
        },
        precision_recall_at_k=[1, 10],
        map_at_k=[40],
    )
    for dim in (32, 8):
        theirs = package.SentenceTransformer(str(model), device="cpu", truncate_dim=dim)
        evaluator.score_functions, evaluator.score_function_names = {"cosine": theirs.similarity}, ["cosine"]
        scores = evaluator.compute_metrices(theirs)["cosine"]
        ours = figures(model, found, (dim,))["dims"][str(dim)]
        assert ours["ndcg_at_10"] == pytest.approx(scores["ndcg@k"][10], abs=1e-9)
        assert ours["mrr_at_10"] == pytest.approx(scores["mrr@k"][10], abs=1e-9)
        assert ours["map"] == pytest.approx(scores["map@k"][40], abs=1e-9)
        assert ours["recall_at_10"] == pytest.approx(scores["recall@k"][10], abs=1e-9)


def test_vectors_are_not_cut_to_more_than_they_have(tmp_path: Path, model: Path) -> None:
    with pytest.raises(WorkloadError, match="dims 64 is more than the 32 numbers of a vector"):
        figures(model, collection(tmp_path), (8, 64))
