from typing import Any

import pytest
import torch

from vramfit.models.build import build_meta
from vramfit.models.resolve import resolve
from vramfit.step.plain import make_batch
from vramfit.workload import CHOICES


def shapes(task: Any, mode: str = "train", mask: str = "none", model: str = "bert-tiny") -> dict[str, tuple[int, ...]]:
    twin = build_meta(resolve(model, task=task))
    made = make_batch(twin, task, mode, mask, 4, 16, "cpu")
    assert {t.dtype for t in made.values()} == {torch.int64}
    return {name: tuple(t.shape) for name, t in made.items()}


@pytest.mark.parametrize(
    ("task", "labels"),
    [
        ("sequence-classification", {"labels": (4,)}),
        ("token-classification", {"labels": (4, 16)}),
        ("question-answering", {"start_positions": (4,), "end_positions": (4,)}),
        ("masked-lm", {"labels": (4, 16)}),
        ("pretraining", {"labels": (4, 16), "next_sentence_label": (4,)}),
        ("features", {}),
    ],
)
def test_training_has_the_labels_of_its_task(task: str, labels: dict[str, tuple[int, ...]]) -> None:
    assert shapes(task) == {"input_ids": (4, 16)} | labels


@pytest.mark.parametrize(
    ("model", "labels"),
    [
        ("albert-base-v2", {"labels", "sentence_order_label"}),
        ("electra-small-discriminator", {"labels"}),
        ("bert-tiny", {"labels", "next_sentence_label"}),
    ],
)
def test_each_family_names_the_second_label_of_pretraining_its_own_way(model: str, labels: set[str]) -> None:
    assert set(shapes("pretraining", model=model)) == {"input_ids"} | labels


@pytest.mark.parametrize("mode", ["forward", "infer"])
@pytest.mark.parametrize("task", CHOICES["task"])
def test_without_training_there_are_no_labels(task: str, mode: str) -> None:
    assert set(shapes(task, mode)) == {"input_ids"}


def test_ids_come_first_then_the_mask_then_labels() -> None:
    assert list(shapes("question-answering", mask="padded")) == [
        "input_ids",
        "attention_mask",
        "start_positions",
        "end_positions",
    ]


def test_start_and_end_of_an_answer_are_one_tensor() -> None:
    made = make_batch(torch.nn.Linear(1, 1), "question-answering", "train", "none", 4, 16, "meta")
    assert made["start_positions"] is made["end_positions"]


def mask_of(mask: str, batch: int = 4, seq: int = 16) -> torch.Tensor:
    return make_batch(torch.nn.Linear(1, 1), "features", "train", mask, batch, seq, "cpu")["attention_mask"]


def test_a_mask_of_ones_hides_nothing() -> None:
    assert bool(mask_of("ones").all())


def test_a_padded_mask_hides_tails_of_half_of_the_rows_and_never_a_whole_row() -> None:
    for batch, seq in ((4, 16), (1, 2), (3, 7)):
        mask = mask_of("padded", batch, seq)
        assert not bool(mask.all())
        assert bool(mask[:, 0].all())
        assert int((mask.sum(1) < seq).sum()) == batch - batch // 2


def test_a_sequence_of_one_token_has_nothing_to_hide() -> None:
    assert bool(mask_of("padded", 4, 1).all())


@pytest.mark.parametrize("mask", CHOICES["mask"])
def test_on_the_meta_device_every_mask_can_be_made(mask: str) -> None:
    made = make_batch(torch.nn.Linear(1, 1), "masked-lm", "train", mask, 2**31 - 1, 512, "meta")
    assert all(t.is_meta for t in made.values())
    assert ("attention_mask" in made) == (mask != "none")
