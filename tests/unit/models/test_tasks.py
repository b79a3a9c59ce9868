"""Heads and attention kernels, as transformers tells them."""

import pytest
from torch import nn
from transformers import BertConfig, BertForMaskedLM, DebertaV2Config, ModernBertConfig, ViTConfig

from vramfit.errors import WorkloadError
from vramfit.models.configuration import (
    class_for_task,
    default_attention,
    supported_attention,
    supported_tasks,
    task_of_class,
)
from vramfit.models.resolve import resolve
from vramfit.workload import CHOICES


def test_bert_has_a_head_for_every_task() -> None:
    assert supported_tasks(BertConfig()) == CHOICES["task"]


def test_modernbert_has_no_pretraining_head() -> None:
    assert "pretraining" not in supported_tasks(ModernBertConfig())


def test_pretraining_of_bert_is_its_two_headed_class() -> None:
    assert class_for_task(BertConfig(), "pretraining").__name__ == "BertForPreTraining"


def test_a_task_without_head_says_which_there_are() -> None:
    with pytest.raises(
        WorkloadError, match=r"modernbert models have no head for task 'pretraining'.*masked-lm"
    ) as caught:
        resolve("modernbert-base", task="pretraining")
    assert caught.value.hint


def test_an_image_model_has_features_only() -> None:
    with pytest.raises(WorkloadError, match=r"vit models have no head .*they have features"):
        resolve(ViTConfig())


def test_a_task_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(WorkloadError, match="'translation' is not one of sequence-classification"):
        resolve("bert-tiny", task="translation")


def test_a_class_knows_its_task_and_the_asked_one_wins_a_tie() -> None:
    assert task_of_class(BertForMaskedLM, BertConfig(), preferred="features") == "masked-lm"
    roberta = resolve("roberta-base", task="pretraining")
    assert task_of_class(roberta.model_class, roberta.config, preferred="pretraining") == "pretraining"
    assert task_of_class(nn.Linear, BertConfig(), preferred="features") == "features"


def test_bert_takes_sdpa_and_deberta_only_eager() -> None:
    assert supported_attention(BertConfig())[:2] == ("sdpa", "eager")
    assert default_attention(BertConfig()) == "sdpa"
    assert supported_attention(DebertaV2Config()) == ("eager",)
    assert default_attention(DebertaV2Config()) == "eager"


def test_attention_is_the_same_for_a_configuration_its_class_and_a_model() -> None:
    config = BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    assert (
        supported_attention(config)
        == supported_attention(BertForMaskedLM)
        == supported_attention(BertForMaskedLM(config))
    )


def test_packed_attention_needs_the_attention_interface() -> None:
    assert "packed" in supported_attention(BertConfig())
    assert "packed" not in supported_attention(DebertaV2Config())
