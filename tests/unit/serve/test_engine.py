"""Answers inside one process: those of transformers, for every task, in any company, whatever becomes of memory."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.training.conftest import one_thread  # noqa: F401
from tests.unit.runtime.training.small_runs import write_model
from tests.unit.serve.small_servers import ask, engine_of, write_head
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from vramfit.errors import CheckpointError, NoPlanFits, WorkloadError
from vramfit.runtime import trained
from vramfit.serve import engine as engine_module
from vramfit.serve import requests
from vramfit.serve.requests import INVOCATIONS
from vramfit.tasks import find_task

TEXTS = ("the film was great", "anna", "tom saw the awful film and the music was dull . tom lives in berlin . " * 6)
Heads = dict[str, Path]


def vector(folder: Path, text: str, pooling: str = "mean") -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(text, truncation=True, max_length=48, return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state[0]
    return hidden.mean(0) if pooling == "mean" else hidden[0]


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_features_are_those_of_transformers(heads: Heads, pooling: str) -> None:
    engine = engine_of(heads["features"], pooling=pooling)
    assert engine.task == "features"
    for row, text in zip(ask(engine, list(TEXTS)), TEXTS, strict=True):
        expected = vector(heads["features"], text, pooling)
        torch.testing.assert_close(torch.tensor(row["embedding"]), expected, atol=1e-6, rtol=1e-5)


def test_classes_are_those_of_transformers_for_texts_and_pairs(heads: Heads) -> None:
    folder = heads["sequence-classification"]
    engine = engine_of(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pair = {"text": "the film was fine", "text_pair": "the music was dull"}
    made = ask(engine, [TEXTS[0], pair, TEXTS[1]])
    for row, texts in zip(made, [(TEXTS[0],), tuple(pair.values()), (TEXTS[1],)], strict=True):
        with torch.no_grad():
            expected = model(**tokenizer(*texts, return_tensors="pt")).logits.softmax(-1)[0]
        assert row["label"] == model.config.id2label[int(expected.argmax())]
        assert row["probability"] == pytest.approx(float(expected.max()), abs=1e-6)
        assert set(row) == {"label", "probability"}
    assert made[1]["probability"] != made[0]["probability"]


def test_tags_answers_and_fills_come_with_their_places(heads: Heads) -> None:
    tagged = ask(engine_of(heads["token-classification"]), {"tokens": ["anna", "lives", "in", "paris"]})
    assert len(tagged["tags"]) == 4
    assert all(e["text"] == "anna lives in paris"[e["start"] : e["end"]] for e in tagged["entities"])
    context = "the film was warm . anna lives in paris . " * 8
    answered = ask(engine_of(heads["question-answering"]), {"question": "where lives anna", "context": context})
    assert answered["answer"] == context[answered["start"] : answered["end"]] != ""
    assert answered["score"] > -math.inf
    filled = ask(engine_of(heads["masked-lm"]), "the [MASK] was great and the [MASK] was dull")
    assert [fill["position"] for fill in filled["fills"]] == [2, 7]
    assert all(0 < fill["probability"] <= 1 for fill in filled["fills"])


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_packed_batches_answer_the_same(heads: Heads, pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ask(engine_of(heads["features"], pooling=pooling), list(TEXTS))
    monkeypatch.setattr(trained, "has_packed_kernel", lambda *given: True)  # as on a GPU that has it
    packed = engine_of(heads["features"], pooling=pooling)
    for one, other in zip(plain, ask(packed, list(TEXTS)), strict=True):
        assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-5)
    classes = engine_of(heads["sequence-classification"])
    assert [set(row) for row in ask(classes, list(TEXTS))] == [{"label", "probability"}] * 3


def test_every_request_of_a_round_gets_its_own_answer(heads: Heads) -> None:
    engine = engine_of(heads["features"], max_tokens=64)
    bodies: dict[Any, bytes] = {
        n: json.dumps({"inputs": " ".join(TEXTS[2].split()[n : 2 * n + 1])}).encode() for n in range(30)
    }
    together: dict[Any, Any] = {}
    more = {"bad": b"{", "empty": b'{"inputs": ""}'}
    work = engine.prepare([(key, INVOCATIONS, body) for key, body in (bodies | more).items()])
    engine.run(work, together.update)
    assert (together["bad"].status, together["empty"].status) == (400, 400)
    assert engine.num_batches > 5
    for number, body in bodies.items():
        alone = torch.tensor(json.loads(engine.answer(body).body)["embedding"])
        found = torch.tensor(json.loads(together[number].body)["embedding"])
        torch.testing.assert_close(found, alone, atol=1e-6, rtol=1e-5)


def test_batches_hold_to_what_was_predicted_to_fit(heads: Heads) -> None:
    folder = heads["features"]
    small = engine_of(folder, devices=("emulated",), memory="80MiB")
    large = engine_of(folder, devices=("emulated",), memory="200MiB")
    assert 48 <= small.max_tokens < large.max_tokens
    ask(small, [TEXTS[2]] * 200)
    assert small.num_recoveries == 0
    assert small.run_device.reserved_bytes is not None
    assert small.run_device.reserved_bytes <= 80 * 2**20


def test_a_rehearsal_finds_out_what_was_promised_too_much(heads: Heads) -> None:
    engine = engine_of(heads["features"], devices=("emulated",), memory="200MiB", max_tokens=4800)
    engine.rehearse()
    assert engine.max_tokens == 4800
    gpu = engine.run_device.emulated
    assert gpu is not None
    gpu.fail_at |= {gpu.num_allocations + 10, gpu.num_allocations + 40}
    engine.rehearse()
    assert engine.max_tokens == 1200
    assert len(ask(engine, [TEXTS[2]] * 100)) == 100


def test_memory_that_runs_out_reaches_no_client(heads: Heads) -> None:
    plain = ask(engine_of(heads["features"]), list(TEXTS) * 4)
    engine = engine_of(heads["features"], fail_every=2, max_tokens=100)
    disturbed = ask(engine, list(TEXTS) * 4)
    assert engine.num_recoveries >= 3
    for one, other in zip(plain, disturbed, strict=True):
        assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-6)


def test_a_text_that_never_fits_is_told_so_and_the_others_are_answered(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PAUSES_S", (0.0, 0.0, 0.0))
    engine = engine_of(heads["features"])

    def refuse_long(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory: somebody else is here")

    engine._inference.model.register_forward_pre_hook(refuse_long, with_kwargs=True)
    heard: dict[Any, Any] = {}
    bodies = [(n, INVOCATIONS, json.dumps({"inputs": text}).encode()) for n, text in enumerate(TEXTS)]
    engine.run(engine.prepare(bodies), heard.update)
    assert [heard[n].status for n in range(3)] == [200, 200, 503]
    assert b"memory is short" in heard[2].body
    assert heard[2].headers == {"Retry-After": "1"}


def test_values_that_are_no_numbers_are_not_sent(heads: Heads) -> None:
    engine = engine_of(heads["features"])
    with torch.no_grad():
        next(engine._inference.model.parameters()).fill_(math.nan)
    assert "no numbers" in ask(engine, "anna", status=500)["error"]


def test_a_request_of_too_many_tokens_is_refused(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_REQUEST_TOKENS", 100)
    engine = engine_of(heads["features"])
    said = ask(engine, [TEXTS[2]] * 3, status=413)
    assert said["error"].startswith("144 tokens in 3 pieces")
    assert requests.MAX_REQUEST_TOKENS > 100


def test_a_budget_without_room_for_one_text_says_what_would_help(heads: Heads) -> None:
    with pytest.raises(NoPlanFits, match="one of 2 workers' shares") as caught:
        engine_of(heads["features"], devices=("emulated",), memory="40MiB", num_workers=2)
    assert "fewer --workers" in (caught.value.hint or "")


def test_an_encoder_without_a_head_answers_no_task(tmp_path: Path) -> None:
    write_head(tmp_path, "features")
    with pytest.raises(CheckpointError, match="no trained head"):
        engine_of(tmp_path, task="sequence-classification")


def test_a_head_answers_no_other_task_but_its_model_gives_vectors(heads: Heads) -> None:
    folder = heads["sequence-classification"]
    with pytest.raises(CheckpointError, match="no trained head for token-classification"):
        engine_of(folder, task="token-classification")
    assert "embedding" in ask(engine_of(folder, task="features"), TEXTS[0])


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"quantize": "int8"}])
def test_weights_may_have_fewer_bits(heads: Heads, settings: dict[str, str]) -> None:
    if "quantize" in settings:
        pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    row = ask(engine_of(heads["features"], **settings), TEXTS[0])
    expected = vector(heads["features"], TEXTS[0])
    assert torch.nn.functional.cosine_similarity(torch.tensor(row["embedding"]), expected, dim=0) > 0.99


def test_a_text_that_is_cut_before_it_is_tokenized_gets_the_tags_that_it_had(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(heads["token-classification"])
    texts = [" ".join(["anna lives in paris"] * 2_000), "annaparis" * 5_000, {"tokens": ["tom", "x" * 40_000, "anna"]}]
    cut = ask(engine, texts)
    monkeypatch.setattr(engine_module, "beginning", lambda text, tokenizer, length: text)
    assert ask(engine, texts) == cut
    assert cut[0]["num_words_cut"] > 7_000


def test_questions_are_cut_and_contexts_too_long_are_refused_before_they_are_tokenized(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(heads["question-answering"])
    asked = {"question": "where lives anna " * 2_000, "context": "anna lives in paris"}
    cut = ask(engine, asked)
    monkeypatch.setattr(engine_module, "beginning", lambda text, tokenizer, length: text)
    assert ask(engine, asked) == cut
    monkeypatch.setattr(type(find_task("question-answering")), "encode_requests", lambda *given: iter(()))
    told = ask(engine, {"question": "where", "context": "." * 500_000}, status=413)
    assert told["error"] == "a context has more than 65,536 tokens"


def test_hardly_any_of_a_text_without_spaces_is_tokenized_however_long(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(heads["features"])
    seen: list[int] = []
    usual = requests._ids

    def counted(text: str, tokenizer: Any) -> list[int]:
        seen.append(len(text))
        return usual(text, tokenizer)

    monkeypatch.setattr(requests, "_ids", counted)
    told = ask(engine, ["anna", "a" * 8_000_000], status=413)
    most = requests.MOST_CHARACTERS_A_TOKEN * engine.max_length
    assert told["error"] == f"the first {most:,} of a text's 8,000,000 characters do not settle its 48 tokens"
    assert sum(seen) < 2 * most
    assert ask(engine, "anna")["embedding"]


def test_many_texts_of_one_request_are_not_tokenized_beyond_its_limit(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(heads["features"])
    monkeypatch.setattr(type(find_task("features")), "encode_requests", lambda *given: iter(()))
    told = ask(engine, ["a" * 700] * 1_500, status=413)
    assert told["error"] == "the texts have more than the 1,048,576 characters of one request"


@pytest.mark.parametrize("task", ["token-classification", "question-answering"])
def test_where_every_word_is_answered_for_a_long_text_is_refused_at_once(heads: Heads, task: str) -> None:
    text = "." * 3_000_000
    asked = text if task == "token-classification" else {"question": "where", "context": text}
    told = ask(engine_of(heads[task]), asked, status=413)
    assert told["error"].endswith("characters are more than the 1,048,576 of one request")


def test_more_inputs_than_tokens_allowed_are_refused_at_once(heads: Heads) -> None:
    told = ask(engine_of(heads["features"]), ["a"] * 65_537, status=413)
    assert told["error"].startswith("65,537 inputs have more than the 65,536 tokens")


def test_a_request_says_how_many_scores_it_wants_and_a_server_what_is_usual(heads: Heads) -> None:
    folder = heads["sequence-classification"]

    def scores(engine: Any, **parameters: Any) -> Any:
        body = json.dumps({"inputs": TEXTS[0], "parameters": parameters}).encode()
        return json.loads(engine.answer(body).body)

    plain, usual = engine_of(folder), engine_of(folder, top_k=1)
    told = ask(plain, TEXTS[0])
    assert set(told) == {"label", "probability"}
    assert told["probability"] == float(f"{told['probability']:.6g}")
    both = scores(plain, top_k=9)
    assert both == told | {"scores": both["scores"]}
    assert sorted(s["label"] for s in both["scores"]) == ["bad", "good"]
    assert both["scores"][0] == told
    assert ask(usual, TEXTS[0]) == told | {"scores": [told]}
    assert scores(usual, top_k=2) == both
    mixed: list[Any] = []
    bodies = [
        (n, INVOCATIONS, json.dumps({"inputs": TEXTS[0], "parameters": {"top_k": k}}).encode())
        for n, k in enumerate((None, 2))
    ]
    plain.run(plain.prepare(bodies), mixed.extend)
    assert [json.loads(reply.body) for _, reply in sorted(mixed, key=lambda one: one[0])] == [told, both]
    with pytest.raises(WorkloadError, match="top_k is not for features"):
        engine_of(heads["features"], top_k=2)


@pytest.mark.parametrize(
    ("problem", "names", "keys"),
    [
        ("multi_label_classification", ["dull", "rude", "warm"], {"labels"}),
        ("regression", ["score"], {"value"}),
        ("regression", ["calm", "glad"], {"values"}),
    ],
)
def test_heads_of_labels_and_numbers_answer_as_they_learned(
    tmp_path: Path, problem: str, names: list[str], keys: set[str]
) -> None:
    write_model(tmp_path)
    least = [0.01, 0.99, 0.5][: len(names)]
    config = AutoConfig.from_pretrained(tmp_path, problem_type=problem, id2label=dict(enumerate(names)))
    config.thresholds = least
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    row, other = ask(engine_of(tmp_path), list(TEXTS[:2]))
    assert set(row) == set(other) == keys
    with torch.no_grad():
        logits = model(**AutoTokenizer.from_pretrained(tmp_path)(TEXTS[0], return_tensors="pt")).logits[0]
    if problem == "regression":
        assert list(row.get("values", {"score": row.get("value")})) == names
        assert list(row.get("values", row).values()) == pytest.approx(logits.tolist(), abs=1e-5)
        return
    said = {one["label"]: one["probability"] for one in row["labels"]}
    expected = dict(zip(names, logits.sigmoid().tolist(), strict=True))
    given = {name: expected[name] for name, at in zip(names, least, strict=True) if expected[name] >= at}
    assert said == pytest.approx(given, abs=1e-5)
    scored = ask(engine_of(tmp_path, top_k=2), TEXTS[0])
    assert [one["label"] for one in scored["scores"]] == sorted(names, key=lambda n: -expected[n])[:2]
