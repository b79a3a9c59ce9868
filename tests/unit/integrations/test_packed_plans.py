"""Whether a fitted Trainer packs, and for which lengths it plans."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.integrations.packed_trainers import MEMORY, SPLIT, packed_plan
from tests.unit.integrations.small_trainers import make_trainer, rows_of
from tests.unit.integrations.test_packing_rules import Own, own_function
from tests.unit.runtime.small_models import make_batch, make_model
from transformers import Trainer

import vramfit
from vramfit.integrations.trainer import fit_trainer, job, rows
from vramfit.techniques.packing import attention as packed_attention


class Varied:
    """Rows of different lengths, padded to the longest of a batch."""

    def __init__(self, num_rows: int = 64, longest: int = 32) -> None:
        draw = np.random.default_rng(0)
        self.rows = [
            {"input_ids": draw.integers(5, 99, n).tolist(), "labels": i % 3}
            for i, n in enumerate(draw.integers(3, longest + 1, num_rows))
        ]

    @staticmethod
    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        ids = [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]
        mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
        labels = [row["labels"] for row in rows]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}


def large(output: Path, *, attention: str = "sdpa", **given: Any) -> Trainer:
    """Large enough for a GPU not to wait for the host: that is where padding counts."""
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 128}
    samples = Varied(num_rows=256, longest=128)
    settings = {"per_device_train_batch_size": 128, "gradient_accumulation_steps": 2, "bf16": True, **given}
    model = make_model("bert", "sequence-classification", **sizes, attn_implementation=attention)
    return make_trainer(output, rows=samples.rows, data_collator=Varied.collate, **{"model": model, **settings})


def varied_trainer(output: Path, **given: Any) -> Trainer:
    settings = {**SPLIT, "bf16": True, "data_collator": Varied.collate, **given}
    return make_trainer(output, rows=Varied().rows, **settings)


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has the kernel."""
    monkeypatch.setattr(job, "has_packed_kernel", lambda device, precision: True)


@pytest.mark.usefixtures("with_kernel")
def test_packed_is_chosen_where_lengths_vary_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = large(tmp_path)
    fitting = fit_trainer(trainer, memory="2GiB", gpu="a100")
    w = fitting.plan.workload
    assert (w.attention, w.precision) == ("packed", "amp-bf16")
    assert fitting.plan.evaluation.workload.attention == "sdpa"
    assert "-attention=sdpa\n+attention=packed (no padding)\n" in fitting.diff()
    shown = " ".join(capsys.readouterr().err.split())
    assert "packed (no padding)" in shown
    assert f"in passes of up to {fitting.plan.micro_batch * w.seq:,} tokens, without padding" in shown
    assert trainer.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "given",
    [
        {"attention": "sdpa"},
        {"attention": "eager"},
        {"bf16": False},
        {"kind": Own},
        {"compute_loss_func": own_function},
        {"chosen": "eager"},
    ],
    ids=lambda given: "-".join(given),
)
@pytest.mark.usefixtures("with_kernel")
def test_padding_stays_where_it_was_asked_for_or_must(given: dict[str, Any], tmp_path: Path) -> None:
    asked, chosen = given.get("attention"), given.get("chosen", "sdpa")
    trainer = large(tmp_path, attention=chosen, **{n: v for n, v in given.items() if n not in ("attention", "chosen")})
    plan = fit_trainer(trainer, memory="8GiB", gpu="a100", attention=asked, show=False).plan
    assert plan.workload.attention == (asked or chosen)
    assert trainer.model.config._attn_implementation == (asked or chosen)


def test_without_the_kernel_nothing_is_packed_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert fit_trainer(varied_trainer(tmp_path), memory=MEMORY, show=False).plan.workload.attention == "sdpa"
    trainer = varied_trainer(tmp_path)
    assert fit_trainer(trainer, memory=MEMORY, attention="packed", show=False).plan.workload.attention == "packed"
    trainer.train()
    assert trainer.state.global_step == 4
    plain = make_trainer(tmp_path, **SPLIT)
    with pytest.raises(vramfit.WorkloadError, match="its kernel computes in 16 bits, not fp32"):
        fit_trainer(plain, memory=MEMORY, attention="packed", show=False)


def test_rows_that_were_not_looked_at_may_be_as_long_as_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = fit_trainer(varied_trainer(tmp_path), memory=MEMORY, show=False).plan
    monkeypatch.setattr(rows, "MAX_ROWS", 20)
    trainer = varied_trainer(tmp_path)
    partly = fit_trainer(trainer, memory=MEMORY, attention="packed", show=False)
    assert complete.workload.seq == 32
    assert partly.plan.workload.seq == trainer.model.config.max_position_embeddings == 40
    assert any("as long as the model takes" in note for note in partly.notes)


def test_rows_that_are_padded_already_are_counted_by_their_masks(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SPLIT, bf16=True)
    plan = fit_trainer(trainer, memory=MEMORY, attention="packed", show=False).plan
    assert plan.workload.seq == 16
    assert plan.lengths is not None
    assert plan.lengths.mean == pytest.approx(
        float(make_batch("sequence-classification", 20)["attention_mask"].sum()) / 20
    )


def test_a_width_that_no_text_fills_is_planned_for(tmp_path: Path) -> None:
    """An evaluation is as wide as the collator makes it, and a padded pass may be."""

    def wide(rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = Varied.collate(rows)
        room = 40 - batch["input_ids"].shape[1]
        return {n: torch.nn.functional.pad(v, (0, room)) if v.dim() > 1 else v for n, v in batch.items()}

    trainer = varied_trainer(tmp_path, data_collator=wide)
    plan = fit_trainer(trainer, memory=MEMORY, attention="packed", show=False).plan
    assert (plan.workload.seq, plan.evaluation.workload.seq) == (40, 40)
    assert plan.lengths is not None
    assert plan.lengths.mean < 32
    bare = varied_trainer(tmp_path, data_collator=lambda rows: {n: v for n, v in wide(rows).items() if "mask" not in n})
    fitting = fit_trainer(bare, memory=MEMORY, show=False)
    assert (fitting.plan.workload.seq, fitting.plan.lengths) == (40, None)


def test_every_evaluation_set_is_looked_at(tmp_path: Path) -> None:
    trainer = varied_trainer(tmp_path)
    long = Varied(num_rows=4, longest=8).rows
    long[0]["input_ids"] = [7] * 39
    trainer.eval_dataset = {"usual": trainer.eval_dataset, "long": long}
    looked_at = rows.rows_of(trainer, trainer.eval_dataset)
    assert (len(looked_at.lengths), max(looked_at.lengths), looked_at.num_samples) == (68, 39, 64)
    assert fit_trainer(trainer, memory=MEMORY, show=False).plan.workload.seq == 39


def test_training_may_have_longer_texts_than_an_evaluation_that_says_how_long_they_are(tmp_path: Path) -> None:
    batch = rows_of("sequence-classification", 8)

    def collate(given: list[Any]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([batch[row.get("text", 0)][name] for row in given]) for name in batch[0]}

    trainer = make_trainer(tmp_path, rows=[{"text": i} for i in range(8)], data_collator=collate, **SPLIT)
    trainer.eval_dataset = [{"input_ids": [5, 6, 7]}]
    plan = fit_trainer(trainer, memory=MEMORY, show=False).plan
    assert (plan.workload.seq, plan.lengths) == (40, None)


def test_an_evaluation_that_was_planned_packed_is_half_as_large_padded(tmp_path: Path) -> None:
    sizes = []
    for attention in ("sdpa", "packed"):
        plan = packed_plan()
        evaluation = replace(plan.evaluation, workload=replace(plan.evaluation.workload, attention=attention))
        trainer = make_trainer(tmp_path, **SPLIT)
        fit_trainer(trainer, plan=replace(plan, evaluation=evaluation), show=False)
        sizes.append(trainer.args.per_device_eval_batch_size)
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize("chosen", ["flex_attention", "vramfit_packed"])
def test_attention_that_is_not_predicted_is_planned_as_sdpa(chosen: str, tmp_path: Path) -> None:
    packed_attention.register()
    trainer = large(tmp_path)
    trainer.model.config._attn_implementation_internal = chosen
    with torch.compiler.set_stance("force_eager"):  # flex attention runs as it is written, not compiled first
        plan = fit_trainer(trainer, memory="8GiB", gpu="a100", show=False).plan
    assert plan.workload.attention == "sdpa"


def test_a_tokenizer_that_says_less_than_rows_have_is_not_believed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SPLIT)
    longest = max(len(row["input_ids"]) for row in trainer.train_dataset)
    trainer.processing_class = SimpleNamespace(model_max_length=longest // 2)
    assert fit_trainer(trainer, memory=MEMORY, show=False).plan.workload.seq == longest
