"""The card of a model: its numbers add up and survive JSON."""

from importlib.metadata import version

import pytest
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from vramfit.models import ModelCard, model_card, model_names, resolve
from vramfit.models.anatomy import parameters_by_part, weight_bytes
from vramfit.models.build import build_meta
from vramfit.models.configuration import supported_tasks
from vramfit.records.codec import from_json, to_json


def test_bert_base_is_as_published() -> None:
    card = model_card(resolve("bert-base-uncased", num_labels=3))
    assert (card.num_layers, card.hidden_size, card.intermediate_size) == (12, 768, 3072)
    assert (card.num_heads, card.head_size, card.max_positions) == (12, 64, 512)
    assert (card.vocab_size, card.type_vocab_size, card.activation) == (30522, 2, "gelu")
    assert card.parts == {
        "bert.embeddings": 23_837_184,
        "bert.encoder.layer": 85_054_464,
        "bert.pooler": 590_592,
        "classifier": 3 * 768 + 3,
    }
    assert card.num_parameters == card.num_trainable == 109_482_240 + 3 * 768 + 3
    assert card.num_head_parameters == 3 * 768 + 3
    assert card.buffer_bytes == 2 * 512 * 8
    assert (card.default_attention, card.num_labels) == ("sdpa", 3)
    assert (card.saved_with, card.installed) == ("4.6.0.dev0", version("transformers"))


@pytest.mark.parametrize("name", model_names())
def test_the_parts_add_up_to_the_whole_and_no_fact_is_missing(name: str) -> None:
    task = "masked-lm" if "masked-lm" in supported_tasks(resolve(name).config) else "features"
    card = model_card(resolve(name, task=task))
    expected = sum(p.numel() for p in build_meta(resolve(name, task=task)).parameters())
    assert sum(card.parts.values()) == card.num_parameters == expected
    assert card.weight_bytes["fp32"] == 4 * expected == 2 * card.weight_bytes["bf16"]
    assert card.weight_bytes["fp16"] == card.weight_bytes["bf16"]
    assert None not in (card.hidden_size, card.intermediate_size, card.num_heads, card.head_size)
    assert None not in (card.max_positions, card.vocab_size, card.activation)


@pytest.mark.parametrize("name", ["bert-tiny", "camembert-base", "xlm-roberta-base"])
def test_a_tied_decoder_counts_once_and_with_the_embeddings(name: str) -> None:
    card = model_card(resolve(name, task="masked-lm"))
    assert card.num_head_parameters < card.vocab_size * card.hidden_size
    bare = model_card(resolve(name, task="features"))
    embedding_counts = [count for part, count in card.parts.items() if part.endswith("embeddings")]
    assert embedding_counts == [bare.parts["embeddings"]]


def test_albert_tells_layers_passed_from_layers_that_have_weights() -> None:
    card = model_card(resolve("albert-base-v2"))
    assert (card.num_layers, card.num_layer_modules) == (12, 1)


def test_the_card_survives_json() -> None:
    card = model_card(resolve("modernbert-base"))
    assert from_json(ModelCard, to_json(card)) == card


def test_a_frozen_module_says_how_much_of_it_learns() -> None:
    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    module = BertForMaskedLM(config)
    for parameter in module.bert.parameters():
        parameter.requires_grad_(False)
    card = model_card(resolve(module))
    assert (card.origin, card.task) == ("module", "masked-lm")
    assert card.num_trainable == card.num_head_parameters < card.num_parameters


def test_a_module_of_ones_own_has_a_card_of_what_is_known() -> None:
    card = model_card(resolve(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))))
    assert (card.family, card.hidden_size, card.vocab_size) == ("", None, 10)
    assert card.parts == {"0": 40, "1": 15}


def test_a_weight_that_a_lookup_table_shares_counts_once() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    assert weight_bytes(model) == {"fp32": 160, "fp16": 80, "bf16": 80}
    assert parameters_by_part(model) == {"0": 40}
