"""The catalogue: what it lists, under which names, and that its figures are those of the configurations."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.counting import num_calls

from vramfit.models import all_entries, find_entry, max_positions, model_names
from vramfit.models import catalogue as module
from vramfit.models.build import build_meta
from vramfit.models.catalogue import USES
from vramfit.models.resolve import resolve

CONFIGS = Path(module.__file__).parent / "configs"


def test_at_least_25_models_are_listed_in_order() -> None:
    assert len(model_names()) >= 25
    assert list(model_names()) == sorted(set(model_names()))


def test_every_configuration_file_is_an_entry_and_every_entry_has_its_file() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.json")) == list(model_names())


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "distilbert", "electra", "albert"])
def test_the_classic_families_are_there(family: str) -> None:
    assert any(entry.family == family for entry in all_entries())


@pytest.mark.parametrize("family", ["deberta-v2", "mpnet", "camembert", "modernbert", "nomic_bert"])
def test_the_newer_families_are_there(family: str) -> None:
    assert any(entry.family == family for entry in all_entries())


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("bert-base-uncased", "bert-base-uncased"),
        ("google-bert/bert-base-uncased", "bert-base-uncased"),
        ("BERT-Base-Uncased", "bert-base-uncased"),
        (" bert-base-uncased ", "bert-base-uncased"),
        ("FacebookAI/roberta-base", "roberta-base"),
        ("microsoft/deberta-v3-base", "deberta-v3-base"),
        ("answerdotai/ModernBERT-base", "modernbert-base"),
        ("sentence-transformers/all-MiniLM-L6-v2", "all-minilm-l6-v2"),
        ("google/bert_uncased_L-2_H-128_A-2", "bert-tiny"),
        ("electra-base", "electra-base-discriminator"),
        ("nomic-ai/nomic-embed-text-v1.5", "nomic-embed-text-v1.5"),
        ("BAAI/bge-m3", "bge-m3"),
        ("cross-encoder/ms-marco-MiniLM-L-6-v2", "ms-marco-minilm-l6-v2"),
        ("cross-encoder/ms-marco-MiniLM-L6-v2", "ms-marco-minilm-l6-v2"),
        ("sentence-transformers/all-MiniLM-L12-v2", "all-minilm-l12-v2"),
        ("microsoft/BiomedNLP-PubMedBERT-base-uncased-abstract-fulltext", "pubmedbert-base-uncased"),
    ],
)
def test_names_aliases_and_hub_ids_find_the_entry_whatever_their_case(asked: str, name: str) -> None:
    entry = find_entry(asked)
    assert entry is not None
    assert entry.name == name


def test_a_name_that_is_not_there_finds_nothing() -> None:
    assert find_entry("gpt-17") is None
    assert find_entry("somebody/bert-base-uncased") is None


def test_no_two_entries_share_a_name() -> None:
    names = [n.lower() for e in all_entries() for n in {e.name, e.hub_id, *e.aliases}]
    assert len(names) == len(set(names))


def test_every_entry_is_for_something_and_rerankers_have_one_score() -> None:
    assert {entry.use for entry in all_entries()} == set(USES)
    for entry in all_entries():
        config = entry.config_data()
        (saved_as,) = config.get("architectures") or ["none"]
        is_scored = saved_as.endswith("ForSequenceClassification") and len(config.get("id2label", "ab")) == 1
        assert is_scored == (entry.use == "reranker" and not saved_as.endswith("ForCausalLM")), entry.name


def test_every_entry_says_where_its_values_come_from() -> None:
    assert all(entry.source and entry.kind for entry in all_entries())


@pytest.mark.parametrize("name", model_names())
def test_the_figures_listed_are_those_transformers_builds(name: str) -> None:
    entry = find_entry(name)
    assert entry is not None
    resolved = resolve(name, task="features")
    assert sum(p.numel() for p in build_meta(resolved).parameters()) == entry.num_parameters
    config = resolved.config
    assert config.model_type == entry.family
    assert config.num_hidden_layers == entry.num_layers
    assert config.hidden_size == entry.hidden_size
    assert config.num_attention_heads == entry.num_heads
    assert config.vocab_size == entry.vocab_size
    assert max_positions(config) == entry.max_positions


def test_modernbert_large_has_its_current_context_and_the_tensors_it_always_had() -> None:
    entry = find_entry("modernbert-large")
    assert entry is not None
    assert entry.config_data()["max_position_embeddings"] == 8192
    assert entry.config_data()["norm_eps"] == 1e-5
    config = resolve("modernbert-large").config
    config.max_position_embeddings = 512
    before, now = build_meta(resolve(config)), build_meta(resolve("modernbert-large"))
    assert {k: t.shape for k, t in before.state_dict().items()} == {k: t.shape for k, t in now.state_dict().items()}
    assert [b.shape for b in before.buffers()] == [b.shape for b in now.buffers()]


def test_configuration_data_is_a_fresh_copy() -> None:
    entry = find_entry("bert-tiny")
    assert entry is not None
    entry.config_data()["hidden_size"] = 7
    assert entry.config_data()["hidden_size"] == 128


def test_listing_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, json, vramfit.models as m; heavy = {'torch', 'transformers', 'huggingface_hub'}; "
        "print(json.dumps([len(m.all_entries()), sorted(heavy & set(sys.modules))]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == [len(model_names()), []]


def test_listing_names_reads_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **how: (read.append(path.name), read_text(path, **how))[1])
    module._entries.cache_clear()
    assert num_calls(model_names) < 50 * len(model_names())
    assert read == ["catalogue.json"]
