"""Unmodified client libraries against a live server: an embedder and a reranker that share one budget behind a key."""

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.command import vramfit
from tests.unit.checkpoints.broken import load_script
from tests.unit.loader.checkpoints import SENTENCES, minilm
from tests.unit.serve.small_servers import write_head
from tests.unit.serve.test_shapes import write_classifier
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
serving: Any = load_script(ROOT / "benchmarks" / "serving.py")
FORKED = (str(Path(__file__).with_name("serve_from_forks.py")),)
KEY = "a-key-for-tests"
TEXTS = [*SENTENCES, "a very long text that is cut " * 60, "naïve — 東京"]
QUERY, CANDIDATES = "where lives anna", ["anna lives in paris", "the film was dull", "tom saw the film"]
BUDGET = "800MiB"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("ranks"), "LABEL_0")


@pytest.fixture(scope="module")
def server(reranker: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VRAMFIT_API_KEY", KEY)
        models = (f"minilm={minilm()}", f"rank={reranker}")
        started = serving.Server(*models, "--device", "cpu", "--memory", BUDGET, "--timeout", "280", program=FORKED)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def url(server: Any) -> str:
    return str(server.facts["url"])


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    theirs = pytest.importorskip("sentence_transformers")
    made: torch.Tensor = theirs.SentenceTransformer(str(minilm()), device="cpu").encode(TEXTS, convert_to_tensor=True)
    return made


@pytest.fixture(scope="module")
def scores(reranker: Path) -> list[float]:
    theirs = pytest.importorskip("sentence_transformers").CrossEncoder(str(reranker), device="cpu")
    return [float(score) for score in theirs.predict([(QUERY, text) for text in CANDIDATES])]


def send(url: str, path: str, body: Any = None, key: str | None = KEY) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=LIMIT_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def openai_client(url: str, **settings: Any) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(**{"base_url": f"{url}v1", "api_key": KEY, "timeout": LIMIT_S, "max_retries": 0} | settings)


def test_the_memory_is_shared_as_planned(server: Any) -> None:
    models = server.facts["models"]
    assert {name: one["task"] for name, one in models.items()} == {
        "minilm": "embedding",
        "rank": "sequence-classification",
    }
    shares = [one["budget_bytes"] for one in models.values()]
    assert sum(shares) <= 800 * 2**20 < sum(shares) + 100
    assert shares[0] > shares[1] > 0  # MiniLM is the larger one


def test_the_client_of_openai_gets_the_vectors_of_sentence_transformers(url: str, expected: torch.Tensor) -> None:
    client = openai_client(url)
    for asked in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        said = client.embeddings.create(model="minilm", input=TEXTS, **asked)
        vectors = [one.embedding for one in said.data]
        if asked == {"encoding_format": "base64"}:
            vectors = [
                torch.frombuffer(bytearray(base64.b64decode(one)), dtype=torch.float32).tolist() for one in vectors
            ]
        torch.testing.assert_close(torch.tensor(vectors), expected, atol=1e-5, rtol=0)
        assert said.model == "minilm"
        assert said.usage.prompt_tokens == said.usage.total_tokens > 256
    short = client.embeddings.create(model="minilm", input=TEXTS[0], dimensions=64).data[0].embedding
    torch.testing.assert_close(
        torch.tensor(short), torch.nn.functional.normalize(expected[0, :64], dim=-1), atol=1e-5, rtol=0
    )
    by_path = openai_client(f"{url}models/minilm/").embeddings.create(model="whatever", input=TEXTS[0])
    assert by_path.data[0].embedding == pytest.approx(expected[0].tolist(), abs=1e-5)
    assert [model.id for model in client.models.list()] == ["minilm", "rank"]
    assert client.models.retrieve("rank").owned_by == "vramfit"


def test_the_client_of_openai_raises_its_own_errors(url: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai_client(url)
    with pytest.raises(openai.BadRequestError, match="token ids") as caught:
        client.embeddings.create(model="minilm", input=[1, 2, 3])
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="no model is called 'other'"):
        client.embeddings.create(model="other", input="a")
    with pytest.raises(openai.BadRequestError, match="the model gives no vectors"):
        client.embeddings.create(model="rank", input="a")
    with pytest.raises(openai.AuthenticationError) as refused:
        openai_client(url, api_key="another").embeddings.create(model="minilm", input="a")
    assert refused.value.code == "invalid_api_key"


def test_the_client_of_huggingface_hub_gets_vectors_and_labels(url: str, expected: torch.Tensor) -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(token=KEY, timeout=LIMIT_S)
    for path in ("models/minilm/embed", "models/minilm/"):
        made = client.feature_extraction(TEXTS, model=url + path, truncate=True)  # type: ignore[arg-type]
        torch.testing.assert_close(torch.tensor(made), expected, atol=1e-5, rtol=0)
    found = client.text_classification(CANDIDATES[0], model=f"{url}models/rank/predict")
    assert json.loads(json.dumps(found))["label"] == "LABEL_0"


def test_ranks_and_facts_come_in_the_shape_of_text_embeddings_inference(url: str, scores: list[float]) -> None:
    status, ranks = send(url, "rerank", {"model": "rank", "query": QUERY, "texts": CANDIDATES})
    assert status == 200
    assert [rank["index"] for rank in ranks] == sorted(range(3), key=lambda n: -scores[n])
    assert [rank["score"] for rank in ranks] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    _, info = send(url, "models/minilm/info")
    assert info["model_id"] == "minilm"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["model_dtype"]) == (256, "float32")
    assert send(url, "models/rank/info")[1]["model_type"]["reranker"]["id2label"] == {"0": "LABEL_0"}


def test_without_the_key_only_health_is_told(url: str) -> None:
    assert send(url, "health", key=None) == send(url, "ping", key=None) == (200, {})
    for path, shape in (
        ("v1/embeddings", {"error"}),
        ("embed", {"error", "error_type"}),
        ("invocations", {"error", "hint"}),
    ):
        for key in (None, "wrong", f"{KEY}x", ""):
            status, said = send(url, path, {"inputs": "a"}, key)
            assert (status, set(said)) == (401, shape)
    for path in ("metrics", "info", "v1/models", "elsewhere"):
        assert send(url, path, key=None)[0] == 401


def test_sixty_four_clients_with_requests_of_all_shapes(url: str, expected: torch.Tensor, scores: list[float]) -> None:
    client = openai_client(url)
    ranked = sorted(scores, reverse=True)

    def one(number: int) -> bool:
        place = number % len(TEXTS)
        kind = number // len(TEXTS) % 6
        vector = pytest.approx(expected[place].tolist(), abs=1e-5)
        if kind == 0:
            return bool(client.embeddings.create(model="minilm", input=TEXTS[place]).data[0].embedding == vector)
        if kind == 1:
            return bool(send(url, "embed", {"model": "minilm", "inputs": TEXTS[place]}) == (200, [vector]))
        if kind == 2:
            return bool(
                send(url, "models/minilm/invocations", {"inputs": TEXTS[place]}) == (200, {"embedding": vector})
            )
        if kind == 3:
            status, ranks = send(url, "rerank", {"model": "rank", "query": QUERY, "texts": CANDIDATES})
            return status == 200 and [rank["score"] for rank in ranks] == pytest.approx(ranked, abs=1e-5)
        if kind == 4:
            status, said = send(url, "models/rank/predict", {"inputs": [[QUERY, text] for text in CANDIDATES]})
            return status == 200 and [row[0]["score"] for row in said] == pytest.approx(scores, abs=1e-5)
        return send(url, "embed", {"model": "rank" if place % 2 else "minilm", "inputs": 7})[0] in (422, 424)

    with ThreadPoolExecutor(64) as clients:
        assert all(clients.map(one, range(480)))


def test_a_body_that_names_no_model_is_told_which_there_are(url: str) -> None:
    assert send(url, "embed", {"inputs": "a"})[1]["error"].startswith("2 models are served, and the request names none")
    assert send(url, "v1/embeddings", {"input": "a"})[0] == 400
    assert send(url, "models/none/embed", {"inputs": "a"})[0] == 404


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("a={0}", "a={0}"), 2, "two models are called a"),
        (("a b={0}",), 2, "'a b' is no name for a model"),
        (("a={0}", "b={0}"), 2, "2 models need memory"),
        (("a={0}", "b={0}", "--memory", "20MiB"), 3, "and 20.00 MiB is what they share"),
        (("{0}", "--api-key", ""), 2, "the API key is empty"),
    ],
)
def test_what_cannot_be_shared_ends_in_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    model = str(write_head(tmp_path, "features"))
    done = vramfit("serve", *(one.format(model) for one in arguments), "--device", "cpu", "--port", "0")
    assert done.code == code, done.err
    assert words in " ".join(done.err.split())
    assert "Traceback" not in done.err
