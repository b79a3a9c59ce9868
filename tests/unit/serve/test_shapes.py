"""Requests as client libraries send them, answered by an engine: vectors, labels and ranks; and what is refused."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.models.sentence_folders import TEXTS, write_folder
from tests.unit.runtime.training.conftest import one_thread  # noqa: F401
from tests.unit.runtime.training.small_runs import write_model
from tests.unit.serve.small_servers import engine_of
from transformers import AutoConfig, AutoTokenizer, BertForSequenceClassification, pipeline

from vramfit.serve.engine import Engine
from vramfit.serve.requests import INVOCATIONS, Known, Refused, problem
from vramfit.serve.shapes import READERS, shaped
from vramfit.tasks import all_tasks

EMBEDDINGS = "/v1/embeddings"
QUERY, CANDIDATES = "where lives anna", ["anna lives in paris", "the film was dull", "tom saw the film"]
MODELS = [Known(task=task.name, max_length=48) for task in all_tasks() if task.is_served]
MODELS += [
    Known(task="sequence-classification", max_length=48, num_labels=n, label_names=("a", "b")[:n]) for n in (1, 2)
]
MODELS += [Known(task="embedding", max_length=48, num_dims=32, normalizes=True)]


def ask(engine: Engine, path: str, body: Any, status: int = 200) -> Any:
    """What clients of a path are told."""
    reply = shaped(path, engine.answer(json.dumps(body).encode(), path))
    assert reply.status == status, reply.body
    return json.loads(reply.body)


def write_classifier(folder: Path, *names: str, **settings: Any) -> Path:
    write_model(folder)
    config = AutoConfig.from_pretrained(folder, id2label=dict(enumerate(names)))
    config.update(settings)
    torch.manual_seed(7)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine]:
    folder = write_folder(tmp_path_factory.mktemp("sentences"), "Normalize", pooling_mode_mean_tokens=True)
    return folder, engine_of(folder)


SAVED = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0.0"}}
"""What CrossEncoder leaves in a configuration."""


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine]:
    folder = write_classifier(tmp_path_factory.mktemp("ranks"), "LABEL_0")
    return folder, engine_of(folder)


def their_vectors(folder: Path, texts: list[str], **settings: Any) -> torch.Tensor:
    theirs = pytest.importorskip("sentence_transformers")
    model = theirs.SentenceTransformer(str(folder), device="cpu", **settings)
    made: torch.Tensor = model.encode(texts, convert_to_tensor=True)
    return made


def test_vectors_come_as_numbers_and_as_bytes_with_their_tokens_counted(embedder: tuple[Path, Engine]) -> None:
    folder, engine = embedder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = ask(engine, EMBEDDINGS, {"model": "any name", "input": TEXTS, "user": "me"})
    num_tokens = sum(len(ids) for ids in tokenizer(TEXTS, truncation=True, max_length=48)["input_ids"])
    assert (said["object"], said["model"]) == ("list", "any name")
    assert said["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert [(one["object"], one["index"]) for one in said["data"]] == [("embedding", n) for n in range(len(TEXTS))]
    numbers = torch.tensor([one["embedding"] for one in said["data"]])
    torch.testing.assert_close(numbers, their_vectors(folder, TEXTS), atol=1e-6, rtol=0)
    coded = ask(engine, EMBEDDINGS, {"model": "m", "input": TEXTS, "encoding_format": "base64"})
    for row, one in zip(numbers, coded["data"], strict=True):
        found = torch.frombuffer(bytearray(base64.b64decode(one["embedding"])), dtype=torch.float32)
        torch.testing.assert_close(found, row, atol=1e-6, rtol=0)
    assert len(ask(engine, EMBEDDINGS, {"model": "m", "input": TEXTS[0]})["data"]) == 1


def test_vectors_are_cut_and_have_unit_length_again(embedder: tuple[Path, Engine]) -> None:
    folder, engine = embedder
    said = ask(engine, EMBEDDINGS, {"model": "m", "input": TEXTS, "dimensions": 8})
    numbers = torch.tensor([one["embedding"] for one in said["data"]])
    expected = torch.nn.functional.normalize(their_vectors(folder, TEXTS)[:, :8], dim=-1)
    torch.testing.assert_close(numbers, expected, atol=1e-6, rtol=0)
    of_tei = torch.tensor(ask(engine, "/embed", {"inputs": TEXTS, "dimensions": 8}))
    torch.testing.assert_close(of_tei, expected, atol=1e-6, rtol=0)


def test_a_plain_encoder_has_its_vectors_normalized_where_that_is_asked_for(tmp_path: Path) -> None:
    engine = engine_of(write_model(tmp_path))
    plain = torch.tensor([one["embedding"] for one in ask(engine, EMBEDDINGS, {"input": TEXTS})["data"]])
    usual, raw = (torch.tensor(ask(engine, "/", {"inputs": TEXTS} | more)) for more in ({}, {"normalize": False}))
    torch.testing.assert_close(raw, plain)
    torch.testing.assert_close(usual, torch.nn.functional.normalize(plain, dim=-1), atol=1e-6, rtol=0)
    (alone,) = ask(engine, "/embed", {"inputs": TEXTS[0]})
    assert alone == pytest.approx(usual[0].tolist(), abs=1e-6)


@pytest.mark.parametrize("settings", [{}, SAVED], ids=["sequence-classification", "reranking"])
def test_texts_are_ranked_as_a_cross_encoder_ranks_them(
    tmp_path: Path, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    folder = write_classifier(tmp_path, "LABEL_0", **settings)
    engine = engine_of(folder)
    assert engine.task == request.node.callspec.id
    theirs = pytest.importorskip("sentence_transformers").CrossEncoder(str(folder), device="cpu")
    scores = theirs.predict([(QUERY, text) for text in CANDIDATES])
    order = sorted(range(3), key=lambda n: -scores[n])
    for path in ("/rerank", "/"):
        said = ask(engine, path, {"query": QUERY, "texts": CANDIDATES, "return_text": True})
        assert [rank["index"] for rank in said] == order
        assert [rank["text"] for rank in said] == [CANDIDATES[n] for n in order]
        assert [rank["score"] for rank in said] == pytest.approx([float(scores[n]) for n in order], abs=1e-6)
    raw = ask(engine, "/rerank", {"query": QUERY, "texts": CANDIDATES, "raw_scores": True})
    assert set(raw[0]) == {"index", "score"}
    logits = torch.tensor([rank["score"] for rank in raw])
    assert logits.sigmoid().tolist() == pytest.approx([rank["score"] for rank in said], abs=1e-6)


@pytest.mark.parametrize(
    "settings", [{}, {"problem_type": "multi_label_classification"}, {"problem_type": "regression"}], ids=str
)
def test_labels_have_the_scores_of_the_pipeline_of_transformers(tmp_path: Path, settings: dict[str, str]) -> None:
    folder = write_classifier(tmp_path, "bad", "fair", "good", **settings)
    engine = engine_of(folder, task="sequence-classification")
    theirs: Any = pipeline("text-classification", model=str(folder), device="cpu")
    expected = sorted(theirs(CANDIDATES[0], top_k=None), key=lambda one: -one["score"])
    said = ask(engine, "/predict", {"inputs": CANDIDATES[0]})
    assert [one["label"] for one in said] == [one["label"] for one in expected]
    assert [one["score"] for one in said] == pytest.approx([one["score"] for one in expected], abs=1e-6)
    batch = ask(engine, "/", {"inputs": [[CANDIDATES[0]], [QUERY, CANDIDATES[1]]]})
    for found, alone in zip(batch, (said, ask(engine, "/predict", {"inputs": [QUERY, CANDIDATES[1]]})), strict=True):
        assert [one["label"] for one in found] == [one["label"] for one in alone]
        assert [one["score"] for one in found] == pytest.approx([one["score"] for one in alone], abs=1e-6)
    best = {"inputs": CANDIDATES[0], "parameters": {"top_k": 1, "function_to_apply": "none"}}
    raw = ask(engine, "/predict", {"inputs": CANDIDATES[0], "raw_scores": True})
    assert ask(engine, "/predict", best) == raw[:1]


def test_a_round_of_all_shapes_gives_each_its_own(reranker: tuple[Path, Engine]) -> None:
    _, engine = reranker
    asked = {
        INVOCATIONS: {"inputs": CANDIDATES[0]},
        "/predict": {"inputs": [QUERY, CANDIDATES[0]]},
        "/rerank": {"query": QUERY, "texts": CANDIDATES},
        "/embed": {"inputs": QUERY},
    }
    alone = {path: engine.answer(json.dumps(body).encode(), path) for path, body in asked.items()}
    together: dict[Any, Any] = {}
    engine.run(
        engine.prepare([(path, path, json.dumps(body).encode()) for path, body in asked.items()]), together.update
    )
    assert {path: reply.status for path, reply in together.items()} == {
        INVOCATIONS: 200,
        "/predict": 200,
        "/rerank": 200,
        "/embed": 424,
    }
    ranks = [[rank["index"] for rank in json.loads(found["/rerank"].body)] for found in (alone, together)]
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (EMBEDDINGS, {"input": [1, 2]}, 400, "token ids"),
        (EMBEDDINGS, {"input": [[1, 2]]}, 400, "token ids"),
        (EMBEDDINGS, {"input": []}, 400, "an empty list"),
        (EMBEDDINGS, {"input": ["a", None]}, 400, "input[1] is null, not a text"),
        (EMBEDDINGS, {"input": ""}, 400, 'text is empty ({"model": "…", "input": '),
        (EMBEDDINGS, {"input": "a", "dimensions": 33}, 400, "dimensions is 33; vectors of this model have 32"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, 400, "not float or base64"),
        (EMBEDDINGS, {"input": "a", "model": 7}, 400, "model is 7, not a name"),
        (EMBEDDINGS, {"inputs": "a"}, 400, "'inputs' is not known"),
        (EMBEDDINGS, {"model": "a"}, 400, "there is no input"),
        (EMBEDDINGS, ["a"], 400, "a list, not an object"),
        ("/embed", {"inputs": "anna " * 100, "truncate": False}, 413, "more than 48 tokens"),
        ("/embed", {"inputs": "a", "truncation_direction": "left"}, 422, "at their right end"),
        ("/embed", {"inputs": "a", "normalize": False}, 422, "unit length"),
        ("/embed", {"inputs": "a", "normalize": "no"}, 422, "not true or false"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, 422, "prompts are not added here"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 424, "the model is no reranker"),
        ("/predict", {"inputs": "a"}, 424, "gives no labels"),
    ],
    ids=str,
)
def test_what_an_embedder_refuses(embedder: tuple[Path, Engine], path: str, body: Any, status: int, words: str) -> None:
    said = ask(embedder[1], path, body, status)
    assert words in (said["error"] if isinstance(said["error"], str) else said["error"]["message"])


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (EMBEDDINGS, {"input": "a"}, 400, "the model gives no vectors"),
        ("/rerank", {"query": "a", "texts": []}, 422, 'texts is an empty list ({"query": "a text", "texts":'),
        ("/rerank", {"query": "a", "texts": "b"}, 422, "texts a list"),
        ("/rerank", {"query": ["a"], "texts": ["b"]}, 422, "query is to be a text"),
        ("/rerank", {"query": "a", "texts": ["b", 3]}, 422, "texts[1] is a number"),
        ("/rerank", {"query": " ", "texts": ["b"]}, 422, 'query is empty ({"query": "a text", "texts": ["a text", …]'),
        ("/rerank", {"texts": ["b"]}, 422, "there is no query"),
        ("/predict", {"inputs": ["a", "b", "c"]}, 422, "a list of 3"),
        ("/predict", {"inputs": [["a"], "b"]}, 422, "a text, not a text or a pair"),
        ("/predict", {"inputs": [["a", None]]}, 422, "an input has null"),
        ("/predict", {"inputs": "a", "parameters": {"top_k": 0}}, 422, "not a number above 0"),
        ("/predict", {"inputs": "a", "parameters": {"k": 1}}, 422, "'k' is not known"),
    ],
    ids=str,
)
def test_what_a_reranker_refuses(reranker: tuple[Path, Engine], path: str, body: Any, status: int, words: str) -> None:
    said = ask(reranker[1], path, body, status)
    assert words in (said["error"] if isinstance(said["error"], str) else said["error"]["message"])


def test_problems_have_the_shape_of_their_path() -> None:
    said = json.loads(shaped("/v1/anything", problem(429, "full", "later")).body)
    assert said == {
        "error": {
            "message": "full (later)",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
    }
    of_tei = shaped("/embed", problem(503, "no worker"))
    assert json.loads(of_tei.body) == {"error": "no worker", "error_type": "Unhealthy"}
    assert of_tei.headers == {"Retry-After": "1"}
    assert shaped(INVOCATIONS, problem(400, "x", "y")) == problem(400, "x", "y")


FIELDS = "input inputs query texts model dimensions encoding_format normalize truncate raw_scores return_text text"
FIELDS += " truncation_direction parameters top_k function_to_apply instances"
names = st.sampled_from(FIELDS.split())
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("base64")
    | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(
    path=st.sampled_from(sorted(READERS)),
    body=st.dictionaries(names, anything, max_size=5).map(lambda data: json.dumps(data).encode())
    | st.binary(max_size=40),
    known=st.sampled_from(MODELS),
)
def test_whatever_is_sent_is_read_or_refused_in_the_shape_of_its_path(path: str, body: bytes, known: Known) -> None:
    try:
        asked = READERS[path](body, known)
    except Refused as refusal:
        reply = shaped(path, refusal.reply)
        assert reply.status in (400, 413, 422, 424)
        said = json.loads(reply.body)
        assert (
            set(said) == {"error"} if path == EMBEDDINGS else set(said) in ({"error", "hint"}, {"error", "error_type"})
        )
    else:
        assert asked.references
