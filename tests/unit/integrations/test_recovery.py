"""Memory that runs out in mid-epoch, on the emulated GPU: the run goes on from the same step, or says why it cannot."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.integrations.small_trainers import difference, make_trainer
from tests.unit.runtime.small_models import flat_weights, make_model
from transformers import Trainer, TrainerCallback

import vramfit
from vramfit.integrations.trainer import fit_trainer

SETTINGS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-3}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


class Rates(TrainerCallback):
    """The schedule as it was followed; and some steps fail, each at an allocation of its own."""

    def __init__(self, places: Mapping[int, int]) -> None:
        self.rates: list[float] = []
        self.places = places
        self.gpu: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in self.places:
            self.gpu.fail_at = {self.gpu.num_allocations + self.places[state.global_step]}

    def on_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def run(output: Path, places: Mapping[int, int]) -> tuple[Trainer, Rates]:
    rates = Rates(places)
    model = make_model("bert", "sequence-classification", **DROPOUT)
    trainer = make_trainer(output, model=model, num_train_epochs=2, callbacks=[rates], **SETTINGS)
    fit_trainer(trainer, memory="256MiB", micro_batch=4, show=False)
    with vramfit.EmulatedGPU(memory="256MiB") as gpu:
        rates.gpu = gpu
        torch.manual_seed(11)
        trainer.train()
    return trainer, rates


def test_steps_that_ran_out_are_done_again_to_the_bit(tmp_path: Path) -> None:
    quiet, undisturbed = run(tmp_path, {})
    disturbed, rates = run(tmp_path, {1: 20, 3: 120, 4: 250})  # in the first pass of a step, and in its second
    assert disturbed.num_recoveries == 3
    assert rates.rates == undisturbed.rates
    assert disturbed.state.global_step == quiet.state.global_step == 6
    assert torch.equal(flat_weights(disturbed.model), flat_weights(quiet.model))


def test_less_memory_in_mid_epoch_makes_smaller_passes_and_the_same_training(tmp_path: Path) -> None:
    class Thief(TrainerCallback):
        """Another process, from the third step on."""

        gpu: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                self.gpu.empty_cache()
                free = self.gpu.memory_bytes - self.gpu.allocated_bytes
                self.gpu.take(free - (5 << 20))

    found = []
    for steals in (False, True):
        model = make_model("bert", "sequence-classification", hidden_size=64, intermediate_size=2048)
        trainer = make_trainer(tmp_path, model=model, **{**SETTINGS, "per_device_train_batch_size": 4}, size=48)
        fit_trainer(trainer, memory="256MiB", micro_batch=16, show=False)
        with vramfit.EmulatedGPU(memory="256MiB") as gpu:
            thief = Thief()
            thief.gpu = gpu
            if steals:
                trainer.add_callback(thief)
            trainer.train()
        found.append(trainer)
    quiet, disturbed = found
    assert (quiet.num_recoveries, disturbed.state.global_step) == (0, 3)
    assert disturbed.num_recoveries >= 2
    assert disturbed.vramfit.stepper.micro_batch < 16
    assert difference(flat_weights(disturbed.model), flat_weights(quiet.model)) < 1e-5


def test_the_plain_trainer_dies_of_the_same_failure(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SETTINGS)
    with vramfit.EmulatedGPU(memory="256MiB", fail_at=[1500]), pytest.raises(torch.OutOfMemoryError):
        trainer.train()


class Own(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(**inputs)
        return (output.loss, output) if return_outputs else output.loss


def test_a_loss_of_ones_own_is_retried_as_it_is_and_then_explained(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kind=Own, **SETTINGS)
    fit_trainer(trainer, memory="256MiB", show=False)
    with vramfit.EmulatedGPU(memory="256MiB", fail_at=[150]):
        trainer.train()
    assert (trainer.num_recoveries, trainer.state.global_step) == (1, 3)
    trainer = make_trainer(tmp_path, kind=Own, **SETTINGS)
    fit_trainer(trainer, memory="256MiB", show=False)
    with (
        vramfit.EmulatedGPU(memory="256MiB", fail_at=range(150, 5000)),
        pytest.raises(vramfit.RecoveryExhausted, match="cannot be split: FittedOwn") as failure,
    ):
        trainer.train()
    assert "loss_fn" in str(failure.value.hint)


def test_when_nothing_helps_the_message_has_the_step_and_what_was_planned(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SETTINGS)
    fit_trainer(trainer, memory="256MiB", show=False)
    with (
        vramfit.EmulatedGPU(memory="256MiB", fail_at=range(300, 90_000)),
        pytest.raises(vramfit.RecoveryExhausted, match=r"step 1: .* of 256.00 MiB were planned"),
    ):
        trainer.train()


def test_memory_that_runs_out_outside_the_passes_is_explained(tmp_path: Path) -> None:
    class Greedy(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            torch.zeros(2**27)

    trainer = make_trainer(tmp_path, callbacks=[Greedy()], **SETTINGS)
    fit_trainer(trainer, memory="256MiB", show=False)
    with (
        vramfit.EmulatedGPU(memory="256MiB"),
        pytest.raises(vramfit.RecoveryExhausted, match="after 0 steps, outside their passes") as failure,
    ):
        trainer.train()
    assert "resume_from_checkpoint" in str(failure.value.hint)


def surest(p: Any) -> dict[str, float]:
    """A figure that every logit can move."""
    return {"surest": float(np.max(p.predictions, axis=-1).mean()), "labels": int((p.label_ids != -100).sum())}


def make_evaluation(output: Path) -> Trainer:
    """70 MiB of logits."""
    model = make_model("bert", "masked-lm", vocab_size=5000)
    settings = {"size": 240, "compute_metrics": surest, "per_device_eval_batch_size": 16}
    return make_trainer(output, task="masked-lm", model=model, **settings)


def test_an_evaluation_whose_logits_pile_up_fits(tmp_path: Path) -> None:
    expected = make_evaluation(tmp_path).evaluate()
    plain = make_evaluation(tmp_path)
    with vramfit.EmulatedGPU(memory="64MiB"), pytest.raises(torch.OutOfMemoryError):
        plain.evaluate()
    trainer = make_evaluation(tmp_path)
    fit_trainer(trainer, memory="64MiB", show=False)
    with vramfit.EmulatedGPU(memory="64MiB") as gpu:
        found = trainer.evaluate()
    assert gpu.num_failures == 0
    assert found["eval_labels"] == expected["eval_labels"]
    assert found["eval_surest"] == pytest.approx(expected["eval_surest"], rel=1e-6)


def test_an_evaluation_batch_that_does_not_fit_goes_in_halves(tmp_path: Path) -> None:
    def make() -> Trainer:
        model = make_model("bert", "token-classification", intermediate_size=4096)
        return make_trainer(tmp_path, task="token-classification", model=model, size=96, compute_metrics=surest)

    expected = make().evaluate()
    trainer = make()
    fit_trainer(trainer, memory="256MiB", show=False)
    trainer.args.per_device_eval_batch_size = 96
    with vramfit.EmulatedGPU(memory="40MiB"):
        found = trainer.evaluate()
    assert trainer.num_recoveries >= 1
    assert found["eval_labels"] == expected["eval_labels"]
    assert found["eval_surest"] == pytest.approx(expected["eval_surest"], rel=1e-6)
