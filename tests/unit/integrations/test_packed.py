"""Fitted Trainers whose steps have no padding: the gradient is the whole batch's, and all else is as it was."""

import io
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.integrations.packed_trainers import (
    MEMORY,
    PACKED,
    SPLIT,
    STILL,
    TASKS,
    counted,
    packed_plan,
    packed_trainer,
)
from tests.unit.integrations.small_trainers import difference, gradients_of, make_trainer, rows_of, whole_gradient
from tests.unit.integrations.test_gradients import BATCH, SIZE
from tests.unit.runtime.small_models import flat_gradient, flat_weights, make_batch, make_model
from transformers import TrainerCallback

import vramfit
from vramfit.integrations.trainer import fit_trainer
from vramfit.runtime.stepper import Stepper
from vramfit.techniques import casting, packing


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", PACKED)
def test_a_packed_step_is_that_of_the_whole_batch_however_it_is_split(
    family: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(task, SIZE)
    windows = [{n: v[:BATCH] for n, v in batch.items()}, {n: v[BATCH:] for n, v in batch.items()}]
    right = [whole_gradient(family, task, window) for window in windows]
    for num_passes in (2, 4, 8):
        trainer = packed_trainer(tmp_path, family, task, num_passes=num_passes, size=SIZE, **STILL)
        with counted(monkeypatch) as rows:
            found = gradients_of(trainer)
        assert len(rows) > 2
        assert sum(rows) >= SIZE - 2  # but for samples without a label
        assert trainer.vramfit.num_padded == 0
        for gradient, whole in zip(found, right, strict=True):
            assert difference(gradient, whole) <= 1e-5


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
def test_label_smoothing_is_packed_too(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"label_smoothing_factor": 0.1, "size": BATCH, **STILL}
    whole = gradients_of(make_trainer(tmp_path, task=task, per_device_train_batch_size=BATCH, **settings))
    trainer = packed_trainer(tmp_path, task=task, **settings)
    with counted(monkeypatch) as rows:
        assert difference(gradients_of(trainer)[0], whole[0]) <= 1e-5
    assert rows


def test_labels_of_many_classes_and_of_amounts_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {"multi_label_classification": {}, "regression": {"num_labels": 1}}
    for problem, changes in problems.items():
        rows = rows_of("sequence-classification", BATCH)
        for i, row in enumerate(rows):
            amount, classes = torch.tensor(i / 7), torch.tensor([1.0, float(i % 2), 0.0])
            row["labels"] = classes if problem == "multi_label_classification" else amount

        def model(problem: str = problem, changes: dict[str, Any] = changes) -> Any:
            return make_model("bert", "sequence-classification", problem_type=problem, **changes)

        settings = {"rows": rows, **STILL}
        whole = gradients_of(make_trainer(tmp_path, model=model(), per_device_train_batch_size=BATCH, **settings))
        trainer = packed_trainer(tmp_path, model=model(), **settings)
        with counted(monkeypatch) as made:
            assert difference(gradients_of(trainer)[0], whole[0]) <= 1e-5
        assert made


def test_batches_stay_on_the_host_until_a_pass_takes_them(tmp_path: Path) -> None:
    trainer = packed_trainer(tmp_path)
    assert trainer.get_train_dataloader().device is None
    assert trainer.accelerator.device_placement
    assert trainer.get_eval_dataloader().device is not None
    batches, count = trainer.get_batch_samples(
        iter([make_batch("sequence-classification", 4)]), 1, torch.device("meta")
    )
    assert [len(batch["labels"]) for batch in batches] == [4]
    assert count is None or count.device.type == "cpu"
    given = make_trainer(tmp_path, **SPLIT)
    loss = {"loss_fn": lambda output, batch: output.logits.sum(), "count_fn": lambda batch: 1}
    fit_trainer(given, memory=MEMORY, **loss, show=False)
    assert given.get_train_dataloader().device is not None  # its functions may count on it


def test_a_stepper_of_ones_own_packs_again_or_pads(tmp_path: Path) -> None:
    """The model of a fitted Trainer is as it was: nothing packs it that does not say so."""
    task = "token-classification"
    trainer = packed_trainer(tmp_path, task=task, **STILL)
    trainer.train()
    right = whole_gradient("bert", task, make_batch(task))
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    for packs in (False, True):
        assert packing.is_applied(trainer.model) == packs
        Stepper(trainer.model, optimizer, micro_batch=3, seq=16).gradients(make_batch(task))
        assert difference(flat_gradient(trainer.model), right) <= 1e-5
        packing.apply(trainer.model, "token-classification")
    assert len(trainer.model.bert._forward_hooks) == 1


def test_layers_that_are_computed_twice_are_packed_both_times(tmp_path: Path) -> None:
    task = "token-classification"
    plan = packed_plan(task)
    plan = replace(plan, workload=replace(plan.workload, checkpointing="full"))
    trainer = make_trainer(tmp_path, task=task, size=BATCH, **SPLIT, **STILL)
    fit_trainer(trainer, plan=plan, show=False)
    found = gradients_of(trainer)[0]
    assert trainer.model.is_gradient_checkpointing
    assert difference(found, whole_gradient("bert", task, make_batch(task, BATCH))) <= 1e-5


@pytest.mark.parametrize("family", PACKED)
def test_evaluation_and_prediction_are_those_of_the_plain_trainer_to_the_bit(family: str, tmp_path: Path) -> None:
    task = "token-classification"
    trainer = packed_trainer(tmp_path, family, task, learning_rate=1e-3)
    trainer.train()
    assert trainer.model.config._attn_implementation == "sdpa"
    plain = make_trainer(tmp_path, family, task)
    plain.model.load_state_dict(trainer.model.state_dict())
    rows = rows_of(task, 9, seed=5)
    for one in (trainer, plain):
        one.args.per_device_eval_batch_size = 4
    found, expected = trainer.predict(rows), plain.predict(rows)
    assert np.array_equal(found.predictions, expected.predictions)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], abs=0)


def test_several_evaluation_sets_metrics_and_the_best_model_are_kept(tmp_path: Path) -> None:
    def accuracy(p: Any) -> dict[str, float]:
        return {"accuracy": float((np.argmax(p.predictions, 1) == p.label_ids).mean())}

    seen: list[str] = []

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            seen.append(model.config._attn_implementation)

    settings = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    settings |= {"metric_for_best_model": "eval_first_loss", "num_train_epochs": 2, "learning_rate": 1e-3}
    trainer = make_trainer(tmp_path, compute_metrics=accuracy, callbacks=[Look()], **SPLIT, **settings)
    task = "sequence-classification"
    trainer.eval_dataset = {"first": rows_of(task, 6, seed=3), "second": rows_of(task, 9, seed=4)}
    fit_trainer(trainer, plan=packed_plan(), show=False)
    trainer.train()
    metrics = trainer.state.log_history
    assert any("eval_first_accuracy" in entry for entry in metrics)
    assert any("eval_second_accuracy" in entry for entry in metrics)
    assert seen == ["sdpa"] * 4
    saved = json.loads((Path(str(trainer.state.best_model_checkpoint)) / "config.json").read_text())
    assert "vramfit" not in json.dumps(saved)
    trainer.save_model(str(tmp_path / "kept"))
    import transformers

    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "kept")
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(flat_weights(again), flat_weights(trainer.model))


def test_a_packed_run_is_resumed_as_it_would_have_gone_on(tmp_path: Path) -> None:
    settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3}
    through = packed_trainer(tmp_path / "a", **settings)
    through.train()
    resumed = packed_trainer(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert resumed.state.global_step == through.state.global_step == 4
    assert torch.equal(flat_weights(resumed.model), flat_weights(through.model))


def test_a_packed_run_learns_what_the_plain_one_learns(tmp_path: Path) -> None:
    settings = {"num_train_epochs": 2, "learning_rate": 1e-3, "size": SIZE}
    plain = make_trainer(tmp_path, per_device_train_batch_size=BATCH, **settings)
    packed = packed_trainer(tmp_path, **settings)
    plain.train()
    packed.train()
    assert difference(flat_weights(packed.model), flat_weights(plain.model)) < 1e-5


def test_a_model_made_by_the_trainer_itself_is_packed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = "sequence-classification"
    trainer = packed_trainer(tmp_path, model_init=lambda: make_model("bert", task), size=BATCH, **STILL)
    with counted(monkeypatch) as rows:
        found = gradients_of(trainer)[0]
    assert rows
    assert difference(found, whole_gradient("bert", task, make_batch(task, BATCH))) <= 1e-5


def test_memory_that_runs_out_in_packed_and_padded_steps_costs_nothing(tmp_path: Path) -> None:
    """The second step is padded; both are done again, and what is learned is what it would have been."""

    class Starts(TrainerCallback):
        gpu: Any = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            starts.append(self.gpu.num_allocations)

    found, starts, fail_at = [], list[int](), list[int]()
    for _ in range(2):
        rows = rows_of("sequence-classification", 2 * BATCH)
        rows[BATCH + 2]["attention_mask"] = rows[BATCH + 2]["attention_mask"].flip(0)
        noted = Starts()
        trainer = packed_trainer(tmp_path, rows=rows, learning_rate=1e-3, num_passes=2, callbacks=[noted])
        with vramfit.EmulatedGPU(memory="256MiB", fail_at=fail_at) as noted.gpu, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        assert trainer.vramfit.num_padded == 1
        found.append(trainer)
        fail_at = [starts[0] + 60, starts[1] + 250]  # the first one makes the second step begin later
    quiet, disturbed = found
    assert quiet.num_recoveries == 0
    assert [s.num_recoveries for s in (disturbed.vramfit.stepper, disturbed.vramfit.padded)] == [1, 1]
    assert disturbed.num_recoveries == 2
    assert disturbed.state.global_step == 2
    assert disturbed.model.config._attn_implementation == "sdpa"
    assert difference(flat_weights(disturbed.model), flat_weights(quiet.model)) < 1e-6


def test_after_training_the_model_is_as_transformers_made_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SPLIT, bf16=True)
    plan = packed_plan()
    half = replace(plan.workload, precision="amp-bf16", casts="together")
    before = [(name, type(part)) for name, part in trainer.model.named_modules()]
    fit_trainer(trainer, plan=replace(plan, workload=half), show=False)
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            seen.append(casting.is_applied(model))

    trainer.add_callback(Look())
    for _ in range(2):
        trainer.train()
        assert [(name, type(part)) for name, part in trainer.model.named_modules()] == before
        assert not any(module._forward_hooks for module in trainer.model.modules())
        saved = io.BytesIO()
        torch.save(vars(trainer.model)["_modules"], saved)
        assert b"vramfit" not in saved.getvalue()
    assert seen
    assert all(seen)


def test_a_backbone_goes_from_one_task_to_the_next(tmp_path: Path) -> None:
    first = packed_trainer(tmp_path, "roberta", "masked-lm")
    first.train()
    model: Any = make_model("roberta", "sequence-classification")
    model.roberta.encoder = first.model.roberta.encoder
    model.roberta.embeddings = first.model.roberta.embeddings
    second = packed_trainer(tmp_path, "roberta", model=model)
    second.train()
    assert second.vramfit.num_padded == 0


def test_attention_that_the_script_chooses_later_stays_chosen(tmp_path: Path) -> None:
    trainer = packed_trainer(tmp_path)
    trainer.model.set_attn_implementation("eager")
    trainer.train()
    assert trainer.model.config._attn_implementation == "eager"


def test_a_padded_step_has_half_the_tokens_also_where_a_pass_is_one_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []
    gradients = Stepper.gradients

    def noting(self: Stepper, batch: Any) -> Any:
        widths.append((self.micro_batch, self.seq))
        return gradients(self, batch)

    monkeypatch.setattr(Stepper, "gradients", noting)
    rows = rows_of("sequence-classification", BATCH)
    for row in rows:
        row["attention_mask"] = row["attention_mask"].clone()
        row["attention_mask"][1] = 0
    trainer = packed_trainer(tmp_path, num_passes=BATCH, size=BATCH)
    full = trainer.vramfit.plan.workload.seq
    trainer.train_dataset = rows
    with pytest.warns(UserWarning, match="is padded"):
        trainer.train()
    assert trainer.vramfit.plan.micro_batch == 1
    assert widths == [(1, full // 2)]
