"""The parts of a model, found in families as different as ALBERT and ModernBERT."""

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, BertConfig, BertModel

from vramfit.models import (
    backbone,
    build_meta,
    embeddings,
    encoder_layers,
    head_parameters,
    max_positions,
    num_layer_applications,
    resolve,
    vocab_size,
)

FAMILIES = [
    ("bert-base-uncased", "BertModel", "BertLayer", 12),
    ("roberta-base", "RobertaModel", "RobertaLayer", 12),
    ("xlm-roberta-base", "XLMRobertaModel", "XLMRobertaLayer", 12),
    ("camembert-base", "CamembertModel", "CamembertLayer", 12),
    ("distilbert-base-uncased", "DistilBertModel", "TransformerBlock", 6),
    ("electra-base-discriminator", "ElectraModel", "ElectraLayer", 12),
    ("albert-base-v2", "AlbertModel", "AlbertLayerGroup", 1),
    ("deberta-v3-base", "DebertaV2Model", "DebertaV2Layer", 12),
    ("mpnet-base", "MPNetModel", "MPNetLayer", 12),
    ("modernbert-base", "ModernBertModel", "ModernBertEncoderLayer", 22),
    ("nomic-embed-text-v1.5", "NomicBertModel", "NomicBertLayer", 12),
]


@pytest.mark.parametrize(("name", "base", "layer", "count"), FAMILIES)
def test_backbone_and_layers_are_found_in_every_family(name: str, base: str, layer: str, count: int) -> None:
    model = build_meta(resolve(name))
    assert type(backbone(model)).__name__ == base
    assert [type(found).__name__ for found in encoder_layers(model)] == [layer] * count


@pytest.mark.parametrize("name", [row[0] for row in FAMILIES])
def test_embeddings_hold_the_word_embedding_and_no_layer(name: str) -> None:
    model = build_meta(resolve(name))
    part = embeddings(model)
    assert part is backbone(model).embeddings
    layers = encoder_layers(model)
    assert not any(module in layers for module in part.modules())
    assert vocab_size(model) == vocab_size(resolve(name).config)


def test_layers_are_the_same_with_and_without_a_head() -> None:
    with_head = build_meta(resolve("bert-tiny"))
    bare = build_meta(resolve("bert-tiny", task="features"))
    assert len(encoder_layers(with_head)) == len(encoder_layers(bare)) == 2
    assert backbone(bare) is bare


def test_albert_has_one_layer_applied_twelve_times() -> None:
    model = build_meta(resolve("albert-base-v2"))
    assert len(encoder_layers(model)) == 1
    assert num_layer_applications(model) == 12


def test_albert_with_several_layers_a_group_gives_those_layers() -> None:
    config = AlbertConfig(hidden_size=16, num_attention_heads=2, intermediate_size=32, inner_group_num=3)
    assert len(encoder_layers(build_meta(resolve(config)))) == 3


def test_layers_are_found_inside_a_wrapper_of_ones_own() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
            self.encoder = BertModel(config)
            self.project = nn.Linear(16, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.project(self.encoder(ids).pooler_output)

    model = Siamese()
    assert len(encoder_layers(model)) == 3
    assert head_parameters(model) == ("project.weight", "project.bias")


def test_experts_inside_a_layer_are_not_taken_for_layers() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))

    model = nn.Module()
    model.blocks = nn.ModuleList(Layer() for _ in range(4))
    assert [type(layer).__name__ for layer in encoder_layers(model)] == ["Layer"] * 4


def test_a_model_without_layers_has_none() -> None:
    assert encoder_layers(nn.Linear(2, 2)) == []
    assert embeddings(nn.Linear(2, 2)) is None


def test_the_head_is_what_lies_outside_the_backbone() -> None:
    assert head_parameters(build_meta(resolve("bert-tiny"))) == ("classifier.weight", "classifier.bias")
    assert head_parameters(build_meta(resolve("bert-tiny", task="features"))) == ()


@pytest.mark.parametrize("name", ["bert-tiny", "camembert-base", "modernbert-base"])
def test_a_decoder_tied_to_the_word_embedding_is_not_the_heads(name: str) -> None:
    model = build_meta(resolve(name, task="masked-lm"))
    sizes = dict(model.named_parameters())
    assert all(sizes[n].shape != (vocab_size(model), model.config.hidden_size) for n in head_parameters(model))


@pytest.mark.parametrize(
    ("name", "usable"),
    [
        ("bert-tiny", 512),
        ("roberta-base", 512),
        ("xlm-roberta-base", 512),
        ("camembert-base", 512),
        ("mpnet-base", 512),
        ("distilbert-base-uncased", 512),
        ("deberta-v3-small", 512),
        ("modernbert-base", 8192),
    ],
)
def test_usable_positions_leave_out_those_that_padding_takes(name: str, usable: int) -> None:
    resolved = resolve(name)
    assert max_positions(resolved.config) == usable
    assert max_positions(build_meta(resolved)) == usable


def test_the_longest_usable_sequence_runs_and_one_token_more_does_not() -> None:
    config = resolve("roberta-base").config
    config.hidden_size, config.num_hidden_layers, config.num_attention_heads = 8, 1, 2
    config.intermediate_size, config.vocab_size, config.max_position_embeddings = 8, 40, 12
    usable = max_positions(config)
    assert usable == 10
    model = resolve(config).model_class(config).eval()
    model(torch.full((1, usable), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, usable + 1), 5))


def test_without_a_limit_in_the_configuration_there_is_none() -> None:
    assert max_positions(nn.Linear(2, 2)) is None
