"""Models that pool, saved: sentence-transformers opens the folder and gives the same vectors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.unit.loader.checkpoints import SENTENCES, minilm
from tests.unit.models.sentence_folders import TEXTS, write_folder, write_json
from tests.unit.runtime.training.small_runs import write_model

import vramfit
from vramfit.models.tokenizers import load_tokenizer
from vramfit.runtime.training.saving import save_model
from vramfit.techniques.application import prepare
from vramfit.workload import Workload

Made = tuple[Any, Any]


def open_model(folder: Path, **settings: Any) -> Made:
    model, _ = vramfit.load(str(folder), task="embedding", device="cpu", **settings)
    return model, load_tokenizer(folder)


@torch.no_grad()
def vectors(made: Made, texts: list[str] = TEXTS) -> torch.Tensor:
    model, tokenizer = made
    batch = tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt")
    found: torch.Tensor = model.eval()(**batch).embedding
    return found


def their_vectors(folder: Path, texts: list[str] = TEXTS) -> torch.Tensor:
    theirs = pytest.importorskip("sentence_transformers")
    model = theirs.SentenceTransformer(str(folder), device="cpu")
    found: torch.Tensor = model.encode(texts, convert_to_tensor=True)
    return found


def learn(model: torch.nn.Module) -> None:
    """Change everything that learns."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def save(made: Made, output: Path, source: Callable[[], Any] | None = None, max_length: int | None = 40) -> Path:
    output.mkdir(exist_ok=True)
    save_model(*made, output, load_source=source or refuse, max_length=max_length)
    return output


def refuse() -> Any:
    raise AssertionError("a plain model is saved as it is")


@pytest.mark.parametrize("kinds", [("Dense", "Normalize"), ("Normalize", "Dense"), ("Normalize",), ()])
def test_a_trained_model_gives_the_same_vectors_in_sentence_transformers(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    source = write_folder(tmp_path / "source", *kinds, pooling_mode_max_tokens=True)
    made = open_model(source)
    learn(made[0])
    saved = save(made, tmp_path / "saved")
    ours = vectors(made)
    torch.testing.assert_close(ours, their_vectors(saved), atol=1e-6, rtol=0)
    assert torch.equal(ours, vectors(open_model(saved)))
    assert (ours - vectors(open_model(source))).abs().max() > 1e-3
    with safe_open(saved / "model.safetensors", "pt") as file, safe_open(source / "model.safetensors", "pt") as before:
        assert set(file.keys()) == set(before.keys())


def test_a_plain_encoder_becomes_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    made = open_model(write_model(tmp_path / "source"), pooling="cls")
    saved = save(made, tmp_path / "saved")
    names = sorted(str(path.relative_to(saved)) for path in saved.rglob("*.json"))
    assert {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json"} < set(names)
    assert "config_sentence_transformers.json" in names
    assert [row["path"] for row in json.loads((saved / "modules.json").read_text())] == ["", "1_Pooling", "2_Normalize"]
    assert json.loads((saved / "sentence_bert_config.json").read_text())["max_seq_length"] == 40
    assert not (saved / ".model.new").exists()
    torch.testing.assert_close(vectors(made), their_vectors(saved), atol=1e-6, rtol=0)
    theirs = pytest.importorskip("sentence_transformers").SentenceTransformer(str(saved), device="cpu")
    assert theirs.max_seq_length == 40


def test_prompts_and_similarity_are_kept(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", "Normalize")
    kept = {"prompts": {"query": "anna ", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "dot"}
    write_json(source / "config_sentence_transformers.json", kept)
    saved = save(open_model(source), tmp_path / "saved")
    assert json.loads((saved / "config_sentence_transformers.json").read_text()) == kept
    theirs = pytest.importorskip("sentence_transformers").SentenceTransformer(str(saved), device="cpu")
    assert theirs.prompts["query"] == "anna "
    assert theirs.similarity_fn_name == "dot"


def test_adapters_are_merged_and_the_dense_layer_learns_beside_them(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    source = write_folder(tmp_path / "source", "Dense", "Normalize")
    made = open_model(source)
    dense = made[0].embedding_head.layers[0].linear.weight.clone()
    workload = Workload(model="m", task="embedding", batch=2, seq=16, lora=4)
    prepare(made[0], workload)
    learn(made[0])
    assert not torch.equal(dense, made[0].embedding_head.layers[0].linear.weight)
    saved = save(made, tmp_path / "saved", lambda: open_model(source)[0])
    torch.testing.assert_close(vectors(made), their_vectors(saved), atol=1e-6, rtol=0)


def test_weights_that_were_quantized_are_the_source_s_and_the_dense_layer_is_what_was_learned(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    source = write_folder(tmp_path / "source", "Dense", "Normalize")
    made = open_model(source)
    prepare(made[0], Workload(model="m", task="embedding", batch=2, seq=16, quantize="int8", freeze="encoder"))
    learn(made[0])
    saved = save(made, tmp_path / "saved", lambda: open_model(source)[0])
    again = open_model(saved)
    learned = made[0].embedding_head.layers[0].linear.weight
    assert torch.equal(learned, again[0].embedding_head.layers[0].linear.weight)
    torch.testing.assert_close(vectors(again), their_vectors(saved), atol=1e-6, rtol=0)
    torch.testing.assert_close(vectors(made), vectors(again), atol=0.05, rtol=0)  # rounded weights


def test_a_frozen_backbone_leaves_the_dense_layer_to_learn(tmp_path: Path) -> None:
    model, _ = open_model(write_folder(tmp_path, "Dense"))
    prepare(model, Workload(model="m", task="embedding", batch=2, seq=16, freeze="backbone"))
    learns = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert learns == ["embedding_head.layers.0.linear.weight", "embedding_head.layers.0.linear.bias"]


def test_saving_over_an_older_folder_leaves_a_whole_one(tmp_path: Path) -> None:
    made = open_model(write_folder(tmp_path / "source", "Dense", "Normalize"))
    save(made, tmp_path / "saved")
    learn(made[0])
    saved = save(made, tmp_path / "saved", max_length=None)
    assert torch.equal(vectors(made), vectors(open_model(saved)))
    assert json.loads((saved / "sentence_bert_config.json").read_text())["max_seq_length"] == 48


@pytest.mark.parametrize("attention", ["sdpa", "packed"])
def test_a_folder_that_was_trained_further_gives_the_same_vectors_there(tmp_path: Path, attention: str) -> None:
    source = write_folder(tmp_path / "source", "Dense", "Normalize")
    made = model, tokenizer = open_model(source)
    keywords: dict[str, Any] = {"batch": 4, "micro_batch": 2, "attention": attention, "loss": "in-batch"}
    workload = Workload(model="m", task="embedding", seq=16, loop="stepper", **keywords)
    prepare(model, workload)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stepper = vramfit.Stepper(model, vramfit.make_optimizer(model, workload, lr=1e-3), workload)
    texts = ["the film", "great music", "anna lives in paris", "tom", "berlin", "the awful film", "dull", "warm music"]
    batch = {**tokenizer(texts, padding=True, return_tensors="pt")}
    rows = torch.arange(len(texts))
    for _ in range(2):
        stepper.step(batch | {"text_rows": rows, "text_ids": rows})
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {"embedding_head.layers.0.linear.weight", "encoder.layer.0.attention.self.query.weight"} < moved
    saved = save(made, tmp_path / "saved")
    torch.testing.assert_close(vectors(open_model(saved)), their_vectors(saved), atol=1e-6, rtol=0)


def test_a_published_model_goes_there_and_back(tmp_path: Path) -> None:
    source = minilm()
    made = open_model(source)
    ours, theirs = vectors(made, list(SENTENCES)), their_vectors(source, list(SENTENCES))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    saved = save(made, tmp_path / "saved", max_length=256)
    torch.testing.assert_close(their_vectors(saved, list(SENTENCES)), theirs, atol=1e-6, rtol=0)
    theirs_again = pytest.importorskip("sentence_transformers").SentenceTransformer(str(saved), device="cpu")
    theirs_again.save_pretrained(str(tmp_path / "theirs"), create_model_card=False)
    torch.testing.assert_close(vectors(open_model(tmp_path / "theirs"), list(SENTENCES)), theirs, atol=1e-6, rtol=0)
