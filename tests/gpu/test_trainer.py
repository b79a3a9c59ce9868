"""Fitted Trainers on a real GPU: precision, loss scaling, the cap, packed steps, and memory taken away in mid-run."""

import warnings
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.integrations.small_trainers import make_trainer
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, TrainerCallback

from vramfit.integrations.trainer import MonitorCallback, fit_trainer
from vramfit.techniques.application import use_expandable_segments
from vramfit.units import GIB, MIB

pytestmark = pytest.mark.gpu
CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
needs_kernel = pytest.mark.skipif(not CAPABLE, reason="needs a GPU of sm_80 or newer")
MAX_ERROR = 0.01
KEPT_BYTES = 16 * 1024
"""What the Trainer itself keeps on the GPU: running sums, a few of the smallest blocks."""
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


def varied_rows(task: str, num_rows: int = 256) -> list[dict[str, Any]]:
    """Half of them of 256 tokens, half of 128: 64 in a row of the data fill three passes of 4,096 tokens."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for i in range(num_rows):
        ids = torch.randint(5, 3000, (256 if i % 2 else 128,), generator=draw).tolist()
        made.append({"input_ids": ids, "labels": i % 2 if task == "sequence-classification" else [i % 2] * len(ids)})
    return made


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (width - len(values))

    of_tokens = isinstance(rows[0]["labels"], list)
    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], -100) if of_tokens else row["labels"] for row in rows]),
    }


def packing_trainer(output: Path, task: str = "token-classification", **given: Any) -> Any:
    kind = BertForTokenClassification if task == "token-classification" else BertForSequenceClassification
    torch.manual_seed(0)
    settings = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "use_cpu": False, "bf16": True}
    chosen = {"model": kind(BertConfig(vocab_size=3000, num_hidden_layers=6)), "rows": varied_rows(task)}
    return make_trainer(output, **{**chosen, "data_collator": pad, **settings, **given})


@needs_kernel
@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
def test_packed_is_chosen_by_itself_and_stays_inside_the_cap(task: str, tmp_path: Path) -> None:
    trainer = packing_trainer(tmp_path, task)
    torch.cuda.reset_peak_memory_stats()
    fitting = fit_trainer(trainer, memory=2 * GIB, show=False)
    assert fitting.plan.workload.attention == "packed"
    assert "+attention=packed (no padding)" in fitting.diff()
    trainer.train()
    trainer.evaluate()
    assert (trainer.state.global_step, trainer.num_recoveries, trainer.vramfit.num_padded) == (4, 0, 0)
    assert torch.cuda.max_memory_reserved() <= 2 * GIB
    torch.cuda.empty_cache()
    trainer.args.per_device_eval_batch_size = 16
    plain = packing_trainer(tmp_path, task, per_device_eval_batch_size=16)
    plain.model.load_state_dict(trainer.model.state_dict())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


@needs_kernel
@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
def test_packed_steps_take_what_was_predicted(task: str, tmp_path: Path) -> None:
    with get_context("spawn").Pool(1) as fresh:  # where nothing else lies about in memory
        attention, predicted_bytes, seen_bytes, num_odd = fresh.apply(_packed_peak, (str(tmp_path), task))
    assert (attention, num_odd) == ("packed", 0)
    assert predicted_bytes + KEPT_BYTES >= seen_bytes
    assert predicted_bytes <= (1 + MAX_ERROR) * seen_bytes


def _packed_peak(output: str, task: str) -> tuple[Any, int, int, int]:
    use_expandable_segments(torch.device("cuda"))  # before the model is there: see docs/trainer.md
    trainer = packing_trainer(Path(output), task)
    fitting = fit_trainer(trainer, memory=8 * GIB, micro_batch=16, attention="packed", show=False)
    trainer.train()
    plan, num_odd = fitting.plan, trainer.num_recoveries + trainer.vramfit.num_padded
    return plan.workload.attention, plan.estimate.peak_allocated_bytes, torch.cuda.max_memory_allocated(), num_odd


@needs_kernel
@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
def test_a_packed_step_does_not_wait_for_the_device(task: str, tmp_path: Path) -> None:
    """A padded one does: transformers looks at the values of its mask."""
    trainer = packing_trainer(tmp_path, task)
    fit_trainer(trainer, memory=2 * GIB, micro_batch=16, attention="packed", show=False)
    step, num_strict = trainer.training_step, 0

    def strict(*given: Any, **keywords: Any) -> Any:
        nonlocal num_strict
        if trainer.state.global_step == 0:  # makes the optimizer's state, and prepares kernels
            return step(*given, **keywords)
        num_strict += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step(*given, **keywords)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer.training_step = strict
    trainer.train()
    assert num_strict == 3
    assert trainer.num_recoveries == 0


@needs_kernel
def test_a_batch_that_cannot_be_packed_passes_padded_inside_the_same_cap(tmp_path: Path) -> None:
    def sometimes_left(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pad(rows)
        turned = rows[0]["input_ids"] == odd["input_ids"]
        return {name: value.flip(1) if turned and value.dim() > 1 else value for name, value in batch.items()}

    rows = varied_rows("token-classification")
    odd = rows[64]
    trainer = packing_trainer(tmp_path, rows=rows, data_collator=sometimes_left)
    torch.cuda.reset_peak_memory_stats()
    fit_trainer(trainer, memory=2 * GIB, attention="packed", show=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    assert any("step 2 is padded: attention_mask is not ones" in str(w.message) for w in told)
    assert (trainer.state.global_step, trainer.num_recoveries, trainer.vramfit.num_padded) == (4, 0, 1)
    assert torch.cuda.max_memory_reserved() <= 2 * GIB
