"""`check` names what is wrong, and only that; it changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.integrations.small_trainers import gradients_of, make_trainer, rows_of
from tests.unit.runtime.small_models import make_model
from transformers import BertForNextSentencePrediction, Trainer

import vramfit
from vramfit.integrations.trainer import check, fit_trainer

SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def found(trainer: Trainer, name: str) -> list[tuple[str, str]]:
    return [(f.severity, f.what) for f in check(trainer) if f.check == f"trainer.{name}"]


def test_nothing_is_wrong_with_one_pass_a_step(tmp_path: Path) -> None:
    findings = check(make_trainer(tmp_path, per_device_train_batch_size=8))
    assert {f.severity for f in findings} == {"ok"}


def test_the_gravest_comes_first_and_has_a_fix(tmp_path: Path) -> None:
    first = check(make_trainer(tmp_path, **SPLIT))[0]
    assert (first.check, first.severity) == ("trainer.loss_scale", "error")
    assert "BertForSequenceClassification ignores num_items_in_batch" in first.why
    assert "fit_trainer" in first.fix


def test_a_class_that_says_its_loss_is_a_mean_is_right(tmp_path: Path) -> None:
    class Means(Trainer):
        loss_is_scaled_for_ga = False

    heard = hasattr(Trainer, "loss_is_scaled_for_ga")  # not by the oldest that is supported
    assert found(make_trainer(tmp_path, kind=Means, **SPLIT), "loss_scale")[0][0] == ("ok" if heard else "error")


def test_label_smoothing_is_right_as_it_is(tmp_path: Path) -> None:
    assert found(make_trainer(tmp_path, label_smoothing_factor=0.1, **SPLIT), "loss_scale")[0][0] == "ok"


def test_a_search_for_a_batch_size_is_warned_of(tmp_path: Path) -> None:
    (severity, what), *_ = found(make_trainer(tmp_path, auto_find_batch_size=True, **SPLIT), "effective_batch")
    assert severity == "warning"
    assert "effective batch of 8" in what


def test_padding_to_a_fixed_width_is_warned_of_with_its_share(tmp_path: Path) -> None:
    row = {"input_ids": torch.arange(5, 25), "labels": torch.tensor(1)}
    row["attention_mask"] = (torch.arange(20) < 5).long()
    (severity, what), *_ = found(make_trainer(tmp_path, rows=[row] * 8), "padding")
    assert severity == "warning"
    assert what.startswith("75% of all tokens are padding: every sample is 20 wide, the longest of 8 has 5")


def test_logits_that_pile_up_are_counted(tmp_path: Path) -> None:
    model = make_model("bert", "masked-lm", vocab_size=60_000)
    given = {"task": "masked-lm", "model": model, "size": 128, "compute_metrics": dict}
    (severity, what), *_ = found(make_trainer(tmp_path, **given), "evaluation")
    assert severity == "warning"
    assert "468.77 MiB of logits" in what  # 128 samples of 16 tokens: 60,000 logits and a label each
    assert found(make_trainer(tmp_path, **given, eval_accumulation_steps=1), "evaluation")[0][0] == "ok"


def test_checkpointing_with_frozen_layers_is_warned_of(tmp_path: Path) -> None:
    model: Any = make_model("bert", "sequence-classification")
    for part in (model.bert.embeddings, model.bert.encoder.layer[0]):
        part.requires_grad_(False)
    (severity, what), *_ = found(make_trainer(tmp_path, model=model, gradient_checkpointing=True), "checkpointing")
    assert severity == "warning"
    assert "the lowest 1 layers" in what


def test_a_module_that_looks_across_samples_is_an_error(tmp_path: Path) -> None:
    model: Any = make_model("bert", "sequence-classification")
    model.bert.pooler.dense = torch.nn.Sequential(model.bert.pooler.dense, torch.nn.BatchNorm1d(32))
    assert found(make_trainer(tmp_path, model=model), "samples")[0][0] == "error"


def test_a_loss_of_ones_own_is_left_to_its_author(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, *given: Any, **keywords: Any) -> Any:
            return super().compute_loss(*given, **keywords)

    assert found(make_trainer(tmp_path, kind=Own, **SPLIT), "loss_scale")[0][0] == "info"


def test_a_loss_function_that_ignores_the_count_is_an_error(tmp_path: Path) -> None:
    def mean(output: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.logits, labels)

    def divided(output: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.logits, labels, reduction="sum") / num_items_in_batch

    first = check(make_trainer(tmp_path, compute_loss_func=mean, **SPLIT))[0]
    assert (first.check, first.severity) == ("trainer.loss_scale", "error")
    assert "compute_loss_func, and it ignores num_items_in_batch" in first.why
    assert "fit_trainer" not in first.fix
    assert found(make_trainer(tmp_path, compute_loss_func=divided, **SPLIT), "loss_scale")[0][0] == "ok"


def test_a_head_that_is_not_fitted_is_tried_all_the_same(tmp_path: Path) -> None:
    model = BertForNextSentencePrediction(make_model("bert", "sequence-classification").config)
    rows = [{**row, "labels": torch.tensor(1)} for row in rows_of("sequence-classification", 8)]
    trainers = [
        make_trainer(tmp_path, model=model, rows=rows, learning_rate=0.0, max_grad_norm=0.0, **sizes)
        for sizes in (SPLIT, {"per_device_train_batch_size": 8})
    ]
    first = check(trainers[0])[0]
    assert first.what.startswith("A step is 4 times too long")
    assert "per_device_train_batch_size=8 and gradient_accumulation_steps=1" in first.fix
    accumulated, whole = (gradients_of(trainer)[0] for trainer in trainers)
    assert float(accumulated.norm() / whole.norm()) == pytest.approx(4, rel=0.3)


@pytest.mark.parametrize("row", [{"labels": torch.tensor(7)}, {"input_ids": torch.arange(5, 105)}])
def test_samples_that_the_model_cannot_take_are_an_error(row: dict[str, torch.Tensor], tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(5, 15), "labels": torch.tensor(1)} | row] * 8
    trainer = make_trainer(tmp_path, rows=rows, **SPLIT)
    severity, what = found(trainer, "loss_scale")[0]
    assert severity == "error"
    assert "BertForSequenceClassification cannot take samples of the train_dataset (input_ids of 2 ×" in what
    with pytest.raises(vramfit.WorkloadError, match="cannot take samples"):
        fit_trainer(trainer, memory="256MiB", show=False)


def test_samples_without_labels_are_an_error(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(5, 15)}] * 8
    (severity, what), *_ = found(make_trainer(tmp_path, rows=rows, **SPLIT), "loss_scale")
    assert (severity, what) == ("error", "Samples have no labels, only input_ids: there is nothing to learn")


def test_nothing_is_changed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SPLIT)
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    before, training = trainer.args.to_dict(), [m.training for m in trainer.model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    check(trainer)
    assert torch.equal(torch.rand(2), expected)
    assert trainer.args.to_dict() == before
    assert [m.training for m in trainer.model.modules()] == training
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert all(p.grad is None for p in trainer.model.parameters())


def test_something_else_is_refused() -> None:
    with pytest.raises(vramfit.WorkloadError, match="not int"):
        check(3)
