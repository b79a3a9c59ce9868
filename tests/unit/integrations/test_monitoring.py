"""A Trainer's memory watched from the beginning of its training to the end, with nothing changed in it."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.integrations.small_trainers import make_trainer
from tests.unit.runtime.small_models import flat_weights
from torch.nn.modules import module as hooks
from transformers import TrainerCallback

import vramfit
from vramfit.errors import VramfitError, WorkloadError
from vramfit.integrations.trainer import MonitorCallback, fit_trainer

LOGGED = {"logging_strategy": "steps", "logging_steps": 1, "per_device_train_batch_size": 8}
FIGURES = ("vram_allocated_gib", "vram_reserved_gib", "vram_peak_allocated_gib", "vram_peak_reserved_gib")


def train(output: Path, *callbacks: Any, **given: Any) -> Any:
    trainer = make_trainer(output, callbacks=list(callbacks), **{**LOGGED, **given})
    with vramfit.EmulatedGPU(memory="64MiB"):
        trainer.output = trainer.train()
    return trainer


def is_hooked() -> bool:
    return bool(hooks._global_forward_pre_hooks)


def test_memory_is_in_the_logs_and_the_training_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = train(tmp_path)
    capsys.readouterr()
    monitor = MonitorCallback()
    watched = train(tmp_path, monitor)
    assert torch.equal(flat_weights(watched.model), flat_weights(plain.model))
    steps = [entry for entry in watched.state.log_history if "loss" in entry]
    assert len(steps) == 3
    for entry in steps:
        assert 0 < entry["vram_allocated_gib"] <= entry["vram_reserved_gib"] <= 64 / 1024
        assert entry["vram_allocated_gib"] < entry["vram_peak_allocated_gib"] <= entry["vram_peak_reserved_gib"]
    assert "vram_peak_reserved_gib" in capsys.readouterr().out  # what the Trainer prints
    assert watched.output.metrics["vram_peak_reserved_gib"] == round(monitor.record.peak_reserved_bytes / 2**30, 4)
    assert (monitor.record.device, monitor.record.num_steps) == ("emulated", 3)
    assert not is_hooked()


def test_metrics_that_an_evaluation_returns_stay_as_they_are(tmp_path: Path) -> None:
    class Metrics(TrainerCallback):
        seen: Any = None

        def on_evaluate(self, *_: Any, metrics: Any, **__: Any) -> None:
            self.seen = dict(metrics)

    metrics = Metrics()
    trainer = train(tmp_path, MonitorCallback(), metrics, eval_strategy="epoch")
    assert "eval_loss" in metrics.seen
    assert not [name for name in metrics.seen if name.startswith("vram")]
    assert set(FIGURES) <= next(entry for entry in trainer.state.log_history if "eval_loss" in entry).keys()


def test_reporters_see_the_figures_of_a_callback_that_is_attached(tmp_path: Path) -> None:
    class Reporter(TrainerCallback):
        seen: Any = ()

        def on_log(self, *_: Any, logs: Any, **__: Any) -> None:
            self.seen = dict(logs)

    reporter = Reporter()
    trainer = make_trainer(tmp_path, callbacks=[reporter], **LOGGED)
    monitor = MonitorCallback().attach(trainer)
    with vramfit.EmulatedGPU(memory="64MiB"):
        trainer.train()
    assert set(FIGURES) <= set(reporter.seen)
    assert monitor.record is not None


def test_without_a_gpu_there_is_nothing_to_log(tmp_path: Path) -> None:
    monitor = MonitorCallback()
    trainer = make_trainer(tmp_path, callbacks=[monitor], **LOGGED)
    trainer.train()
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("vram")]
    assert monitor.record is not None
    assert (monitor.record.device, monitor.record.num_steps) == ("cpu", 3)


def test_samples_go_to_files(tmp_path: Path) -> None:
    lines, text = tmp_path / "run.jsonl", tmp_path / "run.prom"
    train(tmp_path, MonitorCallback(jsonl=lines, prometheus=text, logs=False))
    events = [json.loads(line) for line in lines.read_text().splitlines()]
    assert events[0]["type"] == "sample"
    assert (events[-1]["type"], events[-1]["num_steps"]) == ("watch", 3)
    assert 'vramfit_steps_total{device="emulated"} 3' in text.read_text()


def test_what_cannot_be_done_is_refused_before_a_step(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"interval_s 0\.001"):
        MonitorCallback(interval_s=0.001)
    monitor = MonitorCallback(jsonl=tmp_path / "nowhere" / "run.jsonl")
    trainer = make_trainer(tmp_path, callbacks=[monitor], **LOGGED)
    with pytest.raises(VramfitError, match=r"cannot write .*run\.jsonl"):
        trainer.train()
    assert trainer.state.global_step == 0


class Fails(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise RuntimeError("enough")


def test_a_run_that_failed_is_watched_on_by_the_next_or_closed(tmp_path: Path) -> None:
    monitor = MonitorCallback()
    trainer = make_trainer(tmp_path, callbacks=[monitor, Fails()], **LOGGED)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="enough"):
            trainer.train()
    assert is_hooked()
    monitor.close()
    monitor.close()
    assert not is_hooked()
    assert monitor.record is not None
    assert monitor.record.num_steps == 4


def test_a_trainer_that_is_dropped_leaves_no_watch_behind(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[MonitorCallback(), Fails()], **LOGGED)
    with pytest.raises(RuntimeError, match="enough"):
        trainer.train()
    assert is_hooked()
    del trainer
    gc.collect()
    assert not is_hooked()


@pytest.mark.parametrize("show", [True, False])
def test_a_fitted_trainer_keeps_a_record_and_tells_once_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], show: bool
) -> None:
    kept = []

    class Keeper(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            kept.append(torch.zeros(2**15))

    trainer: Any = make_trainer(tmp_path, callbacks=[Keeper()], size=40, **LOGGED)
    fit_trainer(trainer, memory="256MiB", show=show)
    assert trainer.vramfit.record is None
    capsys.readouterr()
    with vramfit.EmulatedGPU(memory="256MiB"):
        trainer.train()
        first = capsys.readouterr().err
        trainer.train()
    assert [finding.check for finding in trainer.vramfit.record.findings] == ["watch.tensors-pile-up"]
    assert trainer.vramfit.record.peak_reserved_bytes <= 256 * 2**20
    assert first.count("`kept` holds") == (1 if show else 0)
    assert capsys.readouterr().err == ""
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("vram")]


def test_a_monitor_that_is_there_already_is_the_one_of_the_fitted_trainer(tmp_path: Path) -> None:
    monitor = MonitorCallback()
    trainer: Any = make_trainer(tmp_path, callbacks=[monitor], **LOGGED)
    fit_trainer(trainer, memory="64MiB", show=False)
    with vramfit.EmulatedGPU(memory="64MiB"):
        trainer.train()
    assert [c for c in trainer.callback_handler.callbacks if isinstance(c, MonitorCallback)] == [monitor]
    assert trainer.vramfit.record is monitor.record
    assert set(FIGURES) <= trainer.state.log_history[0].keys()
