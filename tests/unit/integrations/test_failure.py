"""Memory that runs out for good in a fitted Trainer: explained once, and still the error that scripts catch."""

import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.unit.integrations.small_trainers import make_trainer
from tests.unit.runtime.small_models import make_model
from transformers import Trainer, TrainerCallback

import vramfit
from vramfit.integrations.trainer import fit_trainer

SETTINGS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 1e-3}
NEVER = range(300, 90_000)


class Greedy(TrainerCallback):
    """Asks for more than there is, outside of any pass."""

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        torch.zeros(2**27)


class Own(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(**inputs)
        return (output.loss, output) if return_outputs else output.loss


def fitted(output: Path, **given: Any) -> Any:
    trainer = make_trainer(output, **SETTINGS, **given)
    fit_trainer(trainer, memory="256MiB", show=False)
    return trainer


def shown(error: BaseException) -> str:
    """What a user reads below the traceback."""
    return "".join(traceback.format_exception_only(error))


def test_a_step_that_never_fits_says_what_was_alive_and_what_would_have_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = fitted(tmp_path)
    with vramfit.EmulatedGPU(memory="256MiB", fail_at=NEVER) as gpu:
        gpu.take("200MiB")
        with pytest.raises(torch.OutOfMemoryError) as failure:
            trainer.train()
    text = shown(failure.value)
    assert isinstance(failure.value, vramfit.RecoveryExhausted)
    assert "CUDA out of memory. Tried to allocate" in str(failure.value)
    assert "step 1: one sample of 16 tokens does not fit" in text
    assert "56.00 MiB are there for this process, 256.00 MiB were planned" in text
    assert 'a new Trainer, fitted with memory="56MiB", gets it' in text
    assert text.count("alive then:") == text.count("→") == 1
    weights = sum(tensor.nbytes for tensor in (*trainer.model.parameters(), *trainer.model.buffers()))
    alive: Any = failure.value.report.alive  # type: ignore[attr-defined]
    assert next(group.num_bytes for group in alive if group.category == "weights") == weights
    assert capsys.readouterr().err == ""


def test_what_fills_the_memory_is_seen_while_it_is_there(tmp_path: Path) -> None:
    class Hoard(TrainerCallback):
        """Keeps all there is."""

        kept: ClassVar[list[torch.Tensor]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            with suppress(torch.OutOfMemoryError):
                while True:
                    self.kept.append(torch.zeros(2**14))

    model = make_model("bert", "sequence-classification", hidden_size=64)
    trainer = make_trainer(tmp_path, callbacks=[Hoard()], model=model, **SETTINGS)
    fit_trainer(trainer, memory="64MiB", show=False)
    with vramfit.EmulatedGPU(memory="64MiB"), pytest.raises(torch.OutOfMemoryError, match=r"^step 2: ") as failure:
        trainer.train()
    largest = failure.value.report.alive[0]  # type: ignore[attr-defined]
    assert (largest.category, largest.operator) == ("other", "[16384] float32")
    assert largest.num_bytes > 32 * 2**20
    assert "are neither the model's nor the optimizer's" in str(failure.value.hint)  # type: ignore[attr-defined]
    assert failure.value.report.phase in ("forward", "backward")  # type: ignore[attr-defined]


def test_the_plan_that_is_named_is_found_by_a_new_trainer(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SETTINGS)
    fitting = fit_trainer(trainer, memory="56MiB", show=False)
    assert fitting.plan.estimate.safe_reserved_bytes <= 56 * 2**20


def test_memory_that_ran_out_elsewhere_is_explained_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fitted(tmp_path, callbacks=[Greedy()])
    with (
        vramfit.EmulatedGPU(memory="256MiB"),
        pytest.raises(torch.OutOfMemoryError, match="outside their passes") as failure,
        vramfit.watch(),  # somebody else's: there is nothing to add
    ):
        trainer.train()
    text = "".join(traceback.format_exception(failure.value))
    assert text.count("alive then:") == 1
    assert "optimizer (×" in text
    assert "margin=" in text
    assert capsys.readouterr().err == ""


def test_an_optimizer_that_asks_for_memory_is_told_of_the_one_that_does_not(tmp_path: Path) -> None:
    trainer = fitted(tmp_path, callbacks=[Greedy()], optim="sgd")
    with (
        vramfit.EmulatedGPU(memory="256MiB"),
        pytest.raises(torch.OutOfMemoryError, match="the step of SGD") as failure,
    ):
        trainer.train()
    assert "adamw_torch_fused" in shown(failure.value)


def test_an_evaluation_on_its_own_is_explained_too(tmp_path: Path) -> None:
    trainer = fitted(tmp_path)
    with (
        vramfit.EmulatedGPU(memory="256MiB", fail_at=range(60, 90_000)),
        pytest.raises(torch.OutOfMemoryError, match="one sample of an evaluation does not fit") as failure,
    ):
        trainer.evaluate()
    assert failure.value.report.phase == "evaluation"  # type: ignore[attr-defined]
    assert "weights (×" in shown(failure.value)


def test_a_loss_that_cannot_be_split_is_explained_with_what_its_pass_held(tmp_path: Path) -> None:
    trainer = fitted(tmp_path, kind=Own)
    with (
        vramfit.EmulatedGPU(memory="256MiB", fail_at=range(150, 5000)),
        pytest.raises(torch.OutOfMemoryError, match="cannot be split") as failure,
    ):
        trainer.train()
    assert "alive then:" in shown(failure.value)
    assert "loss_fn" in shown(failure.value)


def test_other_errors_pass_through_and_end_the_watch(tmp_path: Path) -> None:
    class Broken(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    trainer = fitted(tmp_path, callbacks=[Broken()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.vramfit.monitor.watch is None
    assert trainer.vramfit.record.num_steps == 1
