"""Fitted Trainers on a real GPU: precision, loss scaling, the cap, and memory taken away in mid-run."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.integrations.small_trainers import make_trainer
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

from vramfit.integrations.trainer import MonitorCallback, fit_trainer
from vramfit.units import GIB, MIB

pytestmark = pytest.mark.gpu
SPLIT = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "use_cpu": False, "size": 160}


def rows() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [{"input_ids": torch.randint(5, 3000, (256,)), "labels": torch.tensor(i % 2)} for i in range(160)]


def model() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=3000, num_hidden_layers=6))


def test_the_precision_is_the_planned_one_and_the_cap_is_kept(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=model(), rows=rows(), **SPLIT)
    torch.cuda.reset_peak_memory_stats()
    fitting = fit_trainer(trainer, memory=2 * GIB, show=False)
    trainer.train()
    trainer.evaluate()
    assert fitting.plan.workload.precision in ("amp-bf16", "tf32")
    assert (trainer.accelerator.mixed_precision == "bf16") == (fitting.plan.workload.precision == "amp-bf16")
    assert bool(trainer.args.tf32) == (fitting.plan.workload.precision == "tf32")
    assert torch.cuda.max_memory_reserved() <= 2 * GIB
    assert trainer.num_recoveries == 0


def test_fp16_steps_with_the_scaler_of_accelerate(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=model(), rows=rows(), fp16=True, learning_rate=1e-4, **SPLIT)
    before = trainer.model.classifier.weight.detach().clone()
    fit_trainer(trainer, memory=2 * GIB, show=False)
    trainer.train()
    assert trainer.accelerator.scaler is not None
    assert not torch.equal(trainer.model.classifier.weight, before)
    assert torch.isfinite(trainer.model.classifier.weight).all()


def test_memory_taken_away_in_mid_run_costs_no_step(tmp_path: Path) -> None:
    class Thief(TrainerCallback):
        taken: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                torch.cuda.empty_cache()
                free = 2 * GIB - torch.cuda.memory_allocated()
                self.taken = torch.empty(free - 500 * MIB, dtype=torch.uint8, device="cuda")

    thief = Thief()
    trainer = make_trainer(tmp_path, model=model(), rows=rows(), callbacks=[thief], **SPLIT)
    fit_trainer(trainer, memory=2 * GIB, micro_batch=32, show=False)
    trainer.train()
    assert (trainer.state.global_step, trainer.num_recoveries > 0) == (5, True)
    thief.taken = None


def test_memory_taken_for_good_is_explained_and_still_the_error_that_scripts_catch(tmp_path: Path) -> None:
    class Hoard(TrainerCallback):
        kept: Any = ()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.kept = []
            with suppress(torch.OutOfMemoryError):
                while True:
                    self.kept.append(torch.empty(MIB // 2, dtype=torch.uint8, device="cuda"))

    hoard = Hoard()
    trainer = make_trainer(tmp_path, model=model(), rows=rows(), callbacks=[hoard], **SPLIT)
    fit_trainer(trainer, memory=2 * GIB, show=False)
    with pytest.raises(torch.OutOfMemoryError, match=r"^step 2: .*CUDA out of memory\. Tried to allocate") as failure:
        trainer.train()
    notes = "\n".join(failure.value.__notes__)
    assert notes.count("alive then:") == 1
    assert failure.value.report.alive[0].operator == "[524288] uint8"  # type: ignore[attr-defined]
    hoard.kept = ()


def test_the_figures_in_the_logs_are_those_of_torch(tmp_path: Path) -> None:
    monitor = MonitorCallback()
    settings = {**SPLIT, "logging_strategy": "steps", "logging_steps": 1}
    trainer = make_trainer(tmp_path, model=model(), rows=rows(), callbacks=[monitor], **settings)
    torch.cuda.reset_peak_memory_stats()
    metrics = trainer.train().metrics
    assert metrics["vram_peak_allocated_gib"] == round(torch.cuda.max_memory_allocated() / GIB, 4)
    assert metrics["vram_peak_reserved_gib"] == round(torch.cuda.max_memory_reserved() / GIB, 4)
    assert monitor.record is not None
    assert monitor.record.device == "cuda:0"
