"""A fitted Trainer trains as the script said: same order, schedule and weights; what it cannot keep, it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from accelerate.state import AcceleratorState
from tests.unit.integrations.small_trainers import difference, gradients_of, make_trainer, rows_of, whole_gradient
from tests.unit.runtime.small_models import flat_weights, make_batch, make_model
from transformers import Trainer, TrainerCallback

import vramfit
from vramfit.integrations.trainer import check, fit_trainer
from vramfit.integrations.trainer.settings import Settings, put_precision
from vramfit.techniques.adamw_8bit import AdamW8bit

MEMORY = "256MiB"
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
"""An effective batch of 8."""


def fitted(output: Path, **given: Any) -> Trainer:
    fit = {name: given.pop(name) for name in ("micro_batch", "loss_fn", "count_fn") if name in given}
    trainer = make_trainer(output, **{**SPLIT, **given})
    fit_trainer(trainer, memory=MEMORY, show=False, **{"micro_batch": 3, **fit})
    return trainer


class Seen(TrainerCallback):
    """What a run did: learning rates and steps."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


class Noted(list[Any]):
    """A collator that notes which samples it was given."""

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        self.append([int(row["input_ids"][0]) for row in rows])
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def test_weights_order_and_schedule_are_those_of_the_whole_batch_run(tmp_path: Path) -> None:
    settings = {"num_train_epochs": 2, "train_sampling_strategy": "random", "learning_rate": 1e-3, "size": 21}
    runs = []
    for name in ("whole", "fitted"):
        seen, noted = Seen(), Noted()
        given = {**settings, "callbacks": [seen], "data_collator": noted}
        if name == "whole":
            trainer = make_trainer(tmp_path, per_device_train_batch_size=8, **given)
        else:
            trainer = fitted(tmp_path, **given)
        noted.clear()
        torch.manual_seed(7)
        trainer.train()
        runs.append((flat_weights(trainer.model), seen.rates, list(noted), trainer.state.global_step))
    whole, found = runs
    assert found[1:] == whole[1:]
    assert difference(found[0], whole[0]) < 1e-5


def test_what_was_changed_is_said_as_a_record_and_as_a_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, **SPLIT, auto_find_batch_size=True)
    fitting = fit_trainer(trainer, memory=MEMORY, micro_batch=3)
    changed = {change.name: (change.before, change.after) for change in fitting.changes}
    assert changed["per_device_train_batch_size"] == ("2", "8")
    assert changed["gradient_accumulation_steps"] == ("4", "1")
    assert changed["auto_find_batch_size"] == ("True", "False")
    assert "-gradient_accumulation_steps=4\n+gradient_accumulation_steps=1\n" in fitting.diff()
    assert trainer.args.eval_accumulation_steps >= 1
    assert (fitting.plan.micro_batch, fitting.plan.accumulate) == (3, 3)
    shown = capsys.readouterr().err
    assert "8 samples as before, in 3 passes of at most 3" in shown
    assert "gradient_accumulation_steps" in shown


def test_fitting_draws_nothing_from_random_generators(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SPLIT)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    check(trainer)
    fit_trainer(trainer, memory=MEMORY, show=False)
    assert torch.equal(torch.rand(3), expected)


def test_a_refused_trainer_is_as_it_was(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SPLIT)
    before = trainer.args.to_dict()
    with pytest.raises(vramfit.NoPlanFits):
        fit_trainer(trainer, memory="1MiB", show=False)
    assert trainer.args.to_dict() == before
    assert type(trainer) is Trainer


def test_a_run_is_resumed_as_it_would_have_gone_on(tmp_path: Path) -> None:
    settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    through = fitted(tmp_path / "a", **settings)
    through.train()
    resumed = fitted(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert resumed.state.global_step == through.state.global_step == 6
    assert torch.equal(flat_weights(resumed.model), flat_weights(through.model))


def test_a_plain_run_is_resumed_by_a_fitted_one(tmp_path: Path) -> None:
    settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    plain = make_trainer(tmp_path / "a", per_device_train_batch_size=8, **settings)
    plain.train()
    resumed = fitted(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert resumed.state.global_step == plain.state.global_step == 6
    assert difference(flat_weights(resumed.model), flat_weights(plain.model)) < 1e-5


def test_settings_that_have_no_argument_are_put_into_the_trainer(tmp_path: Path) -> None:
    task, chosen = "sequence-classification", {"optimizer": "adamw-8bit", "checkpointing": 1, "precision": "fp32"}
    model = make_model("bert", task, hidden_size=128)
    plan = vramfit.plan(model, task=task, batch=8, seq=16, memory=MEMORY, max_grad_norm=1.0, **chosen)
    trainer = make_trainer(tmp_path, model=model, gradient_checkpointing=True, **SPLIT)
    fitting = fit_trainer(trainer, plan=plan, show=False)
    trainer.train()
    assert {"optimizer", "layers computed twice", "gradient_checkpointing"} <= {c.name for c in fitting.changes}
    assert isinstance(trainer.optimizer.optimizer, AdamW8bit)
    assert [layer.gradient_checkpointing for layer in trainer.model.bert.encoder.layer] == [True, False]
    assert trainer.state.global_step == 3


def test_a_lower_precision_reaches_training_and_evaluation(tmp_path: Path) -> None:
    plan = fit_trainer(make_trainer(tmp_path, **SPLIT, bf16=True), memory=MEMORY, show=False).plan
    AcceleratorState._reset_state()  # Trainers of one process share it
    trainer = make_trainer(tmp_path, **SPLIT)
    assert trainer.accelerator.mixed_precision == "no"
    put_precision(Settings(trainer), plan)
    assert (trainer.args.bf16, trainer.accelerator.mixed_precision) == (True, "bf16")
    seen: list[bool] = []
    trainer.model.bert.embeddings.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    trainer.evaluate()
    assert all(seen)


def test_metrics_callbacks_and_a_subclass_are_kept(tmp_path: Path) -> None:
    class Mine(Trainer):
        num_logs = 0

        def log(self, *given: Any, **keywords: Any) -> None:
            self.num_logs += 1
            super().log(*given, **keywords)

    def accuracy(p: Any) -> dict[str, float]:
        return {"accuracy": float((np.argmax(p.predictions, 1) == p.label_ids).mean()), "seen": len(p.label_ids)}

    settings = {"kind": Mine, "compute_metrics": accuracy, "eval_strategy": "epoch", "logging_strategy": "epoch"}
    trainer = fitted(tmp_path, **settings)
    trainer.train()
    assert isinstance(trainer, Mine)
    assert trainer.num_logs >= 2
    plain = make_trainer(tmp_path, model=trainer.model, compute_metrics=accuracy)
    found, expected = trainer.evaluate(), plain.evaluate()
    assert found["eval_seen"] == 20
    assert found["eval_accuracy"] == expected["eval_accuracy"]


def test_a_model_made_by_the_trainer_itself_is_fitted_too(tmp_path: Path) -> None:
    trainer = fitted(tmp_path, model_init=lambda: make_model("bert", "sequence-classification"), max_grad_norm=0.0)
    found = gradients_of(trainer)[0]
    batch = {n: v[:8] for n, v in make_batch("sequence-classification", 20).items()}
    assert difference(found, whole_gradient("bert", "sequence-classification", batch)) <= 1e-5


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
def test_label_smoothing_is_that_of_the_whole_batch(task: str, tmp_path: Path) -> None:
    settings = {"task": task, "label_smoothing_factor": 0.1, "size": 8, "learning_rate": 0.0, "max_grad_norm": 0.0}
    whole = gradients_of(make_trainer(tmp_path, per_device_train_batch_size=8, **settings))
    assert difference(gradients_of(fitted(tmp_path, **settings))[0], whole[0]) <= 1e-5


def test_a_loss_function_that_divides_by_the_count_is_split(tmp_path: Path) -> None:
    def loss(output: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        total = torch.nn.functional.cross_entropy(output.logits, labels, reduction="sum", label_smoothing=0.2)
        return total / (num_items_in_batch if num_items_in_batch is not None else len(labels))

    settings = {"compute_loss_func": loss, "size": 8, "learning_rate": 0.0, "max_grad_norm": 0.0}
    whole = gradients_of(make_trainer(tmp_path, per_device_train_batch_size=8, **settings))
    assert difference(gradients_of(fitted(tmp_path, **settings))[0], whole[0]) <= 1e-5


def test_a_loss_function_that_is_a_mean_is_refused_by_name(tmp_path: Path) -> None:
    def loss(output: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.logits, labels)

    trainer = fitted(tmp_path, compute_loss_func=loss)
    with pytest.raises(vramfit.WorkloadError, match="not their sum"):
        trainer.train()


class Weighted(Trainer):
    """As people write it for classes of unequal size."""

    weight = torch.tensor([1.0, 5.0, 2.0])

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        output = model(**inputs)
        loss = torch.nn.functional.cross_entropy(output.logits, labels, weight=self.weight)
        return (loss, output) if return_outputs else loss


def test_a_loss_of_a_subclass_gets_whole_batches(tmp_path: Path) -> None:
    settings = {"kind": Weighted, "size": 8, "learning_rate": 0.0, "max_grad_norm": 0.0}
    whole = gradients_of(make_trainer(tmp_path, per_device_train_batch_size=8, **settings))
    found = gradients_of(fitted(tmp_path, micro_batch=None, **settings))
    assert difference(found[0], whole[0]) <= 1e-6


def test_a_loss_of_a_subclass_is_split_once_it_is_given_as_a_sum(tmp_path: Path) -> None:
    def total(output: Any, batch: Any) -> torch.Tensor:
        labels = batch["labels"]
        return torch.nn.functional.cross_entropy(output.logits, labels, weight=Weighted.weight, reduction="sum")

    def count(batch: Any) -> Any:
        return float(Weighted.weight[batch["labels"]].sum())

    settings = {"kind": Weighted, "size": 8, "learning_rate": 0.0, "max_grad_norm": 0.0}
    whole = gradients_of(make_trainer(tmp_path, per_device_train_batch_size=8, **settings))
    found = gradients_of(fitted(tmp_path, loss_fn=total, count_fn=count, **settings))
    assert difference(found[0], whole[0]) <= 1e-5


def test_frozen_layers_and_an_optimizer_of_ones_own_are_kept(tmp_path: Path) -> None:
    model: Any = make_model("bert", "sequence-classification")
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=False)
    trainer = make_trainer(tmp_path, model=model, optimizers=(optimizer, None), **SPLIT)
    fitting = fit_trainer(trainer, memory=MEMORY, micro_batch=4, show=False)
    assert (fitting.plan.workload.freeze, fitting.plan.workload.optimizer) == ("embeddings", "adamw-single")
    before = model.bert.embeddings.word_embeddings.weight.clone()
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, before)


def test_bf16_that_the_script_asks_for_is_kept(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SPLIT, bf16=True)
    fitting = fit_trainer(trainer, memory=MEMORY, gpu="a100", micro_batch=4, show=False)
    assert fitting.plan.workload.precision == "amp-bf16"
    trainer.train()
    assert trainer.state.global_step == 3


def test_labels_of_many_classes_at_once_are_right(tmp_path: Path) -> None:
    rows = rows_of("sequence-classification", 8)
    for i, row in enumerate(rows):
        row["labels"] = torch.tensor([1.0, float(i % 2), 0.0])
    settings = {"rows": rows, "learning_rate": 0.0, "max_grad_norm": 0.0}

    def model() -> Any:
        return make_model("bert", "sequence-classification", problem_type="multi_label_classification")

    whole = gradients_of(make_trainer(tmp_path, model=model(), per_device_train_batch_size=8, **settings))
    assert difference(gradients_of(fitted(tmp_path, model=model(), **settings))[0], whole[0]) <= 1e-5


def test_a_peft_model_is_fitted_and_only_its_adapters_learn(tmp_path: Path) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        settings = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
        return peft.get_peft_model(make_model("bert", "sequence-classification"), settings)

    settings = {"size": 8, "learning_rate": 0.0, "max_grad_norm": 0.0}
    whole = gradients_of(make_trainer(tmp_path, model=model(), per_device_train_batch_size=8, **settings))
    trainer = fitted(tmp_path, model=model(), **settings)
    assert difference(gradients_of(trainer)[0], whole[0]) <= 1e-5
    assert trainer.vramfit.plan.estimate.breakdown["optimizer"] < trainer.vramfit.plan.estimate.breakdown["weights"]


def test_a_data_loader_that_makes_other_batches_is_refused_before_anything_is_learned(tmp_path: Path) -> None:
    class OwnLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)

    trainer = fitted(tmp_path, kind=OwnLoader)
    with pytest.raises(vramfit.WorkloadError, match="gives 2 samples, and a step is to have 8"):
        trainer.train()


@pytest.mark.parametrize(
    ("rows", "words"),
    [([], "the train_dataset is empty"), ([{"input_ids": torch.arange(9)}] * 8, "input_ids: they have no labels")],
)
def test_nothing_to_learn_from_is_said(rows: Any, words: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train_dataset = rows
    with pytest.raises(vramfit.WorkloadError, match=words):
        fit_trainer(trainer, memory=MEMORY, show=False)


class OwnStep(Trainer):
    def training_step(self, *given: Any, **keywords: Any) -> Any:
        return super().training_step(*given, **keywords)


class OwnHead(torch.nn.Module):
    """A model that is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 3)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = self.line(input_ids.float().mean(1, keepdim=True))
        return torch.nn.functional.cross_entropy(logits, labels), logits


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": OwnStep}, "OwnStep has a training_step of its own"),
        ({"optim": "lion_32bit"}, "the optimizer lion_32bit is not predicted"),
        ({"model": OwnHead()}, "OwnHead is no head of transformers"),
        ({"kind": Weighted, "micro_batch": 2}, "Weighted computes a loss of its own"),
    ],
)
def test_what_cannot_be_kept_right_is_refused_by_name(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    size = given.get("micro_batch")
    trainer = make_trainer(tmp_path, **SPLIT, **{n: v for n, v in given.items() if n != "micro_batch"})
    with pytest.raises(vramfit.WorkloadError, match=words):
        fit_trainer(trainer, memory=MEMORY, micro_batch=size, show=False)


def test_bad_calls_are_refused_with_what_to_do(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SPLIT)
    with pytest.raises(vramfit.WorkloadError, match="not str"):
        fit_trainer("trainer", memory=MEMORY)
    with pytest.raises(vramfit.WorkloadError, match="give memory= or gpu="):
        fit_trainer(trainer)
    with pytest.raises(vramfit.WorkloadError, match="give the Trainer a peft model"):
        fit_trainer(trainer, memory=MEMORY, allow="lora")
    with pytest.raises(vramfit.WorkloadError, match="go together"):
        fit_trainer(trainer, memory=MEMORY, loss_fn=print)
    with pytest.raises(vramfit.UnknownGPU):
        fit_trainer(trainer, gpu="t44", show=False)
    wrong: dict[str, Any] = {"plan": "plan.json", "micro_batch": "x", "seq": 2.5}
    with pytest.raises(vramfit.WorkloadError, match=r"plan is a str.*micro_batch 'x' is not a.*seq 2.5 is not a"):
        fit_trainer(trainer, memory=MEMORY, **wrong)
    with pytest.raises(vramfit.WorkloadError, match="seq 5: samples of the Trainer are up to 16 tokens wide"):
        fit_trainer(trainer, memory=MEMORY, seq=5)
    fit_trainer(trainer, memory=MEMORY, show=False)
    with pytest.raises(vramfit.WorkloadError, match="fitted already"):
        fit_trainer(trainer, memory=MEMORY)


def test_a_plan_for_another_job_is_refused(tmp_path: Path) -> None:
    plan = fit_trainer(make_trainer(tmp_path, **SPLIT), memory=MEMORY, show=False).plan
    other = make_trainer(tmp_path, task="token-classification", per_device_train_batch_size=4)
    with pytest.raises(vramfit.WorkloadError, match=r"task sequence-classification.*batch 8"):
        fit_trainer(other, plan=plan)


def test_a_plan_never_leaves_weights_of_a_trainer_in_host_memory(tmp_path: Path) -> None:
    """A Trainer's optimizer steps what is on the device: such a plan was once made, and left out without a word."""
    trainer = make_trainer(tmp_path, **SPLIT)
    waiting = vramfit.plan(trainer.model, batch=8, seq=24, memory=MEMORY, offload="weights", precision="fp32")
    with pytest.raises(vramfit.WorkloadError, match="offload weights, and a Trainer's optimizer"):
        fit_trainer(trainer, plan=waiting, show=False)


def test_an_input_without_a_row_a_sample_is_named(tmp_path: Path) -> None:
    def collate(rows: list[Any]) -> dict[str, Any]:
        return {n: torch.stack([row[n] for row in rows]) for n in rows[0]} | {"position_ids": torch.arange(16)[None]}

    trainer = make_trainer(tmp_path, **SPLIT, data_collator=collate)
    with pytest.raises(vramfit.WorkloadError, match="position_ids"):
        fit_trainer(trainer, memory=MEMORY, show=False)


def test_rows_that_are_not_tokenized_yet_need_a_length(tmp_path: Path) -> None:
    rows = [{"text": i} for i in range(8)]
    batch = rows_of("sequence-classification", 8)

    def collate(given: list[Any]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([batch[row["text"]][name] for row in given]) for name in batch[0]}

    trainer = make_trainer(tmp_path, **SPLIT, rows=rows, data_collator=collate, remove_unused_columns=False)
    fitting = fit_trainer(trainer, memory=MEMORY, seq=16, show=False)
    assert fitting.plan.workload.seq == 16
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_run_takes_what_is_said_and_no_more(tmp_path: Path) -> None:
    with vramfit.EmulatedGPU(memory="512MiB", allocator="expandable") as gpu:
        trainer = make_trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
        fitting = fit_trainer(trainer, memory="512MiB", show=False)
        trainer.train()
    assert 0 < gpu.max_reserved_bytes <= fitting.most_bytes
    assert fitting.plan.estimate.safe_reserved_bytes < fitting.most_bytes < 512 * 2**20
