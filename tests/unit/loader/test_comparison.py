"""Outputs compared: padding does not count, labels are labels, sentences come through the folder's tokenizer."""

from pathlib import Path

import pytest
import torch
from tests.unit.loader.checkpoints import minilm, rewrite, write

from vramfit.errors import VramfitError
from vramfit.loader.comparison import (
    SENTENCES,
    compare_logits,
    load_and_compare,
    num_not_finite,
    outputs_of,
    sample_inputs,
)
from vramfit.loader.load import load, make_request


def test_equal_outputs_agree_completely() -> None:
    outputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    made = compare_logits(outputs, outputs.clone(), torch.ones(4, 7), inputs="sentences", labels=True)
    assert made.max_abs_difference == 0
    assert made.cosine == pytest.approx(1)
    assert made.label_agreement == 1


def test_a_label_that_flips_is_counted() -> None:
    reference = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.5]])
    outputs = reference.clone()
    outputs[3] = torch.tensor([0.5, 1.0])
    made = compare_logits(outputs, reference, torch.ones(4, 7), inputs="sentences", labels=True)
    assert made.label_agreement == 0.75
    assert made.max_abs_difference == 0.5


def test_padding_does_not_count() -> None:
    reference = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    outputs = reference.clone()
    outputs[1, 2:] = 100
    made = compare_logits(outputs, reference, mask, inputs="sentences", labels=True)
    assert (made.max_abs_difference, made.label_agreement) == (0, 1)


def test_scores_of_tokens_without_labels_keep_their_shape() -> None:
    reference = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    made = compare_logits(reference, reference, torch.ones(2, 5), inputs="random ids", labels=False)
    assert made.label_agreement is None
    assert made.cosine == pytest.approx(1)


def test_samples_are_sentences_where_there_is_a_tokenizer_and_ids_elsewhere() -> None:
    model, _ = load("bert-tiny", random_weights=True, device="cpu")
    batch, inputs = sample_inputs(model, minilm())
    assert (inputs, len(batch["input_ids"])) == ("sentences", len(SENTENCES))
    assert batch["attention_mask"].min() == 0
    batch, inputs = sample_inputs(model, None)
    assert inputs == "random ids"
    assert outputs_of(model, batch).shape == (len(SENTENCES), 2)


@pytest.mark.parametrize(("task", "shape"), [("question-answering", (16, 32)), ("features", (16, 32, 128))])
def test_the_main_output_of_a_task_is_found(task: str, shape: tuple[int, ...]) -> None:
    model, _ = load("bert-tiny", task=task, random_weights=True, device="cpu")
    assert outputs_of(model, sample_inputs(model, None)[0]).shape == shape


def test_samples_with_outputs_that_are_no_numbers_are_counted_but_for_padding() -> None:
    outputs = torch.zeros(3, 5, 2)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    assert num_not_finite(outputs, mask) == 0
    outputs[1, 4] = float("nan")
    assert num_not_finite(outputs, mask) == 0
    assert compare_logits(outputs, outputs, mask, inputs="sentences", labels=False).max_abs_difference == 0
    outputs[2, 0, 1] = float("inf")
    assert num_not_finite(outputs, mask) == 1
    assert num_not_finite(torch.tensor([[float("nan"), 0.0], [1.0, 2.0]]), mask) == 1


def test_outputs_that_only_fewer_bits_spoil_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path)
    rewrite(tmp_path, lambda t: t | {"classifier.weight": t["classifier.weight"] * 1e7})
    with pytest.raises(VramfitError, match="finite in full precision") as caught:
        load_and_compare(make_request(str(tmp_path), device="cpu", precision="fp16"))
    assert "bf16" in str(caught.value.hint)
    assert load_and_compare(make_request(str(tmp_path), device="cpu", precision="bf16")).comparison is not None
