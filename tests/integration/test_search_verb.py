"""Vectors of texts as a user trains, evaluates and asks for them."""

import json
from pathlib import Path

import pytest

from tests.integration.command import Done, vramfit
from tests.unit.runtime.training.small_runs import BAD, GOOD, write_model


def run(*arguments: str) -> Done:
    return vramfit(*arguments, OMP_NUM_THREADS="1", COLUMNS="150")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("search")
    write_model(made / "source")
    kinds = [(one, other) for one in GOOD for other in BAD]
    pairs = [f"{one} film {other},the {other} was {one}" for one, other in kinds]
    (made / "pairs.csv").write_text("\n".join(["anchor,positive", *pairs]) + "\n")
    scored = [f"{one} film,the {other},{int(one == other)}" for one in GOOD for other in GOOD]
    (made / "scored.csv").write_text("\n".join(["sentence1,sentence2,score", *scored]) + "\n")
    queries = [{"_id": f"q{n}", "text": f"{one} {other}"} for n, (one, other) in enumerate(kinds)]
    documents = [{"_id": f"d{n}", "text": f"{other} music {one}"} for n, (one, other) in enumerate(kinds)]
    for name, rows in (("queries.jsonl", queries), ("corpus.jsonl", documents)):
        (made / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    relevant = [f"q{n}\td{n}\t1" for n in range(len(kinds))]
    (made / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *relevant]) + "\n")
    return made


def search(folder: Path, model: str, *more: str) -> list[str]:
    files = {"--queries": "queries.jsonl", "--documents": "corpus.jsonl", "--relevant": "test.tsv"}
    return ["evaluate", str(folder / model), *(a for o, f in files.items() for a in (o, str(folder / f))), *more]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Done:
    settings = ["--task", "embedding", "--device", "cpu", "--batch", "12", "--lr", "3e-3", "--epochs", "20"]
    paths = ["--model", str(folder / "source"), "--output", str(folder / "out")]
    return run("train", str(folder / "pairs.csv"), *paths, "--eval-data", str(folder / "pairs.csv"), *settings)


def test_a_search_finds_more_after_training(folder: Path, trained: Done) -> None:
    assert trained.code == 0, trained.err
    assert "Training data: read as pairs (anchor, positive), which loss in-batch learns from" in trained.err
    before, after = (json.loads(run(*search(folder, model, "--json")).out) for model in ("source", "out"))
    assert after["ndcg_at_10"] > before["ndcg_at_10"]
    assert (after["num_queries"], after["num_documents"], after["num_relevant"]) == (36, 36, 36)


def test_lengths_of_vectors_stand_side_by_side(folder: Path, trained: Done) -> None:
    found = json.loads(run(*search(folder, "out", "--dims", "32,8", "--json")).out)
    assert found["dims"]["32"]["map"] == found["map"]
    assert found["dims"]["8"]["map"] != found["map"]
    shown = run(*search(folder, "out", "--dims", "32,8")).out
    assert f"({found['map']:.4f} at 32, {found['dims']['8']['map']:.4f} at 8)" in shown
    beyond = run(*search(folder, "out", "--dims", "33"))
    assert beyond.code == 2
    assert "dims 33 is more than the 32 numbers of a vector" in beyond.err


def test_scored_pairs_are_evaluated_as_any_data(folder: Path, trained: Done) -> None:
    done = run("evaluate", str(folder / "out"), str(folder / "scored.csv"), "--json")
    found = json.loads(done.out)
    assert found["num_samples"] == 36
    assert -1 <= found["spearman"] <= 1
    assert "pearson" in found


def test_predict_gives_a_vector_for_a_text(folder: Path, trained: Done) -> None:
    (folder / "texts.txt").write_text("great film\ndull\n")
    done = run("predict", str(folder / "out"), str(folder / "texts.txt"))
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [(row["index"], len(row["embedding"])) for row in rows] == [(0, 32), (1, 32)]
    done = run("predict", str(folder / "out"), str(folder / "pairs.csv"), "--max-rows", "2")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [(row["index"], row["column"]) for row in rows] == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_what_is_wrong_with_a_search_is_said_before_torch_is_imported(folder: Path) -> None:
    (folder / "wrong.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td99\t1\n")
    arguments = [*search(folder, "source")[:-1], str(folder / "wrong.tsv")]
    done = run(*arguments)
    assert done.code == 1
    assert "wrong.tsv: 1 of 1 row cannot be used: row 2: the id 'd99' is not in" in done.err
    few = run("evaluate", str(folder / "source"), "--queries", str(folder / "queries.jsonl"))
    assert few.code == 2
    assert "--documents" in few.err
    both = run(*search(folder, "source"), str(folder / "scored.csv"))
    assert both.code == 2
    none = run(*search(folder, "source", "--task", "features"))
    assert "a search is for models that give vectors of texts, not features" in none.err
    dims = run(*search(folder, "source", "--dims", "8,x"))
    assert "--dims 'x' is not a whole number from 1" in dims.err
    alone = run("evaluate", str(folder / "source"), str(folder / "scored.csv"), "--rerank", str(folder / "source"))
    assert alone.code == 2
    assert "--rerank is for a search" in alone.err
