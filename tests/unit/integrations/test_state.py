"""A fitted Trainer's model with state beside its weights: memory that runs out, anywhere, changes nothing of it."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.integrations.small_trainers import make_trainer
from tests.unit.runtime.small_models import make_model
from tests.unit.runtime.stateful import KINDS, WIDTH, Counter, state_of
from transformers import Trainer

import vramfit
from vramfit.integrations.trainer import fit_trainer

MOVES = "ignore:every forward pass changes:UserWarning"


class Own(Trainer):
    """A loss of its own, which counts."""

    num_losses = 0
    seen: tuple[float, ...] | list[float] = ()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(**inputs)
        self.num_losses += 1
        self.seen = [*self.seen, 1.0][-2:]
        loss = output.loss * (1 + 0.01 * self.num_losses + sum(self.seen))
        return (loss, output) if return_outputs else loss


class Failing:
    """In the place of `training_step`: step n fails at its n-th allocation. Clipping and stepping are the Trainer's."""

    def __init__(self, trainer: Any, gpu: Any, *, fails: bool) -> None:
        self.written, self.gpu, self.fails = trainer.training_step, gpu, fails
        self.sizes: list[int] = []

    def __call__(self, *given: Any) -> Any:
        begun = self.gpu.num_allocations
        self.gpu.fail_at = {begun + len(self.sizes) + 1} if self.fails else set()
        loss = self.written(*given)
        assert self.gpu.num_failures == (len(self.sizes) + 1 if self.fails else 0)
        self.sizes.append(self.gpu.num_allocations - begun)
        return loss


def stateful_model() -> torch.nn.Module:
    small = {"hidden_size": WIDTH, "num_hidden_layers": 1, "intermediate_size": 8, "hidden_dropout_prob": 0.1}
    model: Any = make_model("bert", "sequence-classification", **small)
    model.classifier = torch.nn.Sequential(*(kind() for kind in KINDS.values()), torch.nn.Linear(WIDTH, 3))
    return model  # type: ignore[no-any-return]


def run(output: Path, kind: type[Trainer], num_steps: int, *, fails: bool) -> tuple[Any, int, Trainer]:
    """State and losses after some steps, and the fewest allocations of one."""
    torch.manual_seed(0)
    settings = {
        "max_steps": num_steps,
        "learning_rate": 1e-3,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
    }
    trainer = make_trainer(output, model=stateful_model(), kind=kind, **settings)
    before = state_of(trainer.model)
    fit_trainer(trainer, memory="256MiB", show=False)
    assert state_of(trainer.model) == before  # it has tried the model's loss
    with vramfit.EmulatedGPU(memory="256MiB") as gpu:
        steps: Any = Failing(trainer, gpu, fails=fails)
        trainer.training_step = steps
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    own = (getattr(trainer, "num_losses", 0), list(getattr(trainer, "seen", ())))
    return (losses, state_of(trainer.model), own), min(steps.sizes), trainer


@pytest.mark.filterwarnings(MOVES)
@pytest.mark.parametrize("kind", [Trainer, Own])
def test_a_failure_at_any_allocation_of_a_step_leaves_no_trace_in_a_models_state(
    tmp_path: Path, kind: type[Trainer]
) -> None:
    _, count, _ = run(tmp_path, kind, 4, fails=False)
    gc.freeze()  # recovery collects garbage: what is imported by now need not be looked through each time
    expected, _, _ = run(tmp_path, kind, count, fails=False)
    found, _, trainer = run(tmp_path, kind, count, fails=True)
    assert trainer.num_recoveries == count
    assert found == expected


@pytest.mark.filterwarnings(MOVES)
def test_an_evaluation_batch_that_failed_is_not_counted(tmp_path: Path) -> None:
    model: Any = make_model("bert", "sequence-classification", num_hidden_layers=1)
    counter = Counter()
    model.bert.embeddings.dropout = counter
    trainer = make_trainer(tmp_path, model=model)
    fit_trainer(trainer, memory="256MiB", show=False)
    assert counter.num_calls == 0
    with vramfit.EmulatedGPU(memory="256MiB") as gpu:
        trainer.evaluate()
        num_batches = counter.num_calls
        for place in range(10, 50, 4):  # of the first batch, before and behind the counter
            counter.num_calls, gpu.fail_at = 0, {gpu.num_allocations + place}
            trainer.evaluate()
            assert counter.num_calls == num_batches + 1, place  # two halves in the place of one
    assert trainer.num_recoveries == gpu.num_failures == 10
