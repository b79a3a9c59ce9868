from typing import Any

import pytest
import torch

from vramfit.errors import WorkloadError
from vramfit.models.build import build_meta
from vramfit.models.resolve import resolve
from vramfit.settings import freeze as freezing


def frozen(model: Any, freeze: Any) -> set[str]:
    freezing.apply(model, freeze)
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def names(model: torch.nn.Module, *beginnings: str) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(beginnings)}


def mini(task: str = "sequence-classification") -> Any:
    return build_meta(resolve("bert-mini", task=task))  # four layers


def test_nothing_is_frozen_unless_asked_for() -> None:
    assert frozen(mini(), None) == set()


def test_embeddings_are_all_of_the_embedding_block() -> None:
    model = mini()
    assert frozen(model, "embeddings") == names(model, "bert.embeddings.")


def test_encoder_is_embeddings_and_every_layer_but_not_the_pooler() -> None:
    model = mini()
    assert frozen(model, "encoder") == names(model, "bert.embeddings.", "bert.encoder.")
    assert model.bert.pooler.dense.weight.requires_grad


def test_backbone_is_everything_but_the_head() -> None:
    model = mini()
    assert frozen(model, "backbone") == names(model, "bert.")
    assert all(p.requires_grad for p in model.classifier.parameters())


def test_a_number_freezes_the_lowest_layers_and_the_embeddings() -> None:
    model = mini()
    assert frozen(model, 2) == names(model, "bert.embeddings.", "bert.encoder.layer.0.", "bert.encoder.layer.1.")


def test_all_layers_by_number_are_the_encoder() -> None:
    assert frozen(mini(), 4) == frozen(mini(), "encoder")


@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        ("*.bias", {n for n, _ in mini().named_parameters() if n.endswith(".bias")}),
        (
            ("bert.pooler.*", "classifier.bias"),
            {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.bias"},
        ),
        (
            "bert.encoder.layer.[12].output.dense.weight",
            {f"bert.encoder.layer.{i}.output.dense.weight" for i in (1, 2)},
        ),
    ],
)
def test_patterns_freeze_the_names_they_match(freeze: Any, expected: set[str]) -> None:
    assert frozen(mini(), freeze) == expected


def test_a_tied_decoder_is_frozen_with_the_word_embedding() -> None:
    model = mini("masked-lm")
    freezing.apply(model, "embeddings")
    assert not model.cls.predictions.decoder.weight.requires_grad


@pytest.mark.parametrize("name", ["distilbert-base-uncased", "albert-base-v2", "modernbert-base", "deberta-v3-xsmall"])
def test_every_family_knows_its_embeddings_and_its_backbone(name: str) -> None:
    some, most = build_meta(resolve(name)), build_meta(resolve(name))
    assert frozen(some, "embeddings") < frozen(most, "backbone")
    assert any(p.requires_grad for p in most.parameters())


def test_what_is_frozen_already_stays_frozen() -> None:
    model = mini()
    model.classifier.bias.requires_grad_(False)
    assert "classifier.bias" in frozen(model, "embeddings")


def test_more_layers_than_there_are_is_an_error_with_the_number() -> None:
    with pytest.raises(WorkloadError, match="freeze 5: the model has 4 layers"):
        freezing.apply(mini(), 5)


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"'roberta\.\*' matches no parameter"):
        freezing.apply(mini(), ("bert.*", "roberta.*"))


def test_nothing_left_to_learn_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="leaves nothing to learn"):
        freezing.apply(mini(), "*.*")
    with pytest.raises(WorkloadError, match="leaves nothing to learn"):
        freezing.apply(mini("features"), "backbone")


def test_a_model_without_embeddings_says_so() -> None:
    with pytest.raises(WorkloadError, match="Sequential has no embeddings"):
        freezing.apply(torch.nn.Sequential(torch.nn.Linear(2, 2)), "embeddings")


def test_names_numbers_and_patterns_may_be_mixed() -> None:
    model = mini()
    mixed = frozen(model, ("embeddings", "1", "bert.pooler.*"))
    assert mixed == names(model, "bert.embeddings.", "bert.encoder.layer.0.", "bert.pooler.")
    assert frozen(mini(), ("embeddings", "encoder")) == frozen(mini(), "encoder")
    assert frozen(mini(), ("backbone", "classifier.bias")) == frozen(mini(), "backbone") | {"classifier.bias"}
    with pytest.raises(WorkloadError, match="freeze 5: the model has 4 layers"):
        freezing.apply(mini(), ("embeddings", "5"))
