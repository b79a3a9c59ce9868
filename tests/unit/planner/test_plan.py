"""`plan`: it fits by an independent estimate, keeps what was asked for, and never changes more than is allowed."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.estimator.counting import count_work

import vramfit
from vramfit.errors import NoPlanFits, VramfitError, WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.planner.plan import plan
from vramfit.planner.recipes import Recipe
from vramfit.records.plan import Plan
from vramfit.settings import used_by
from vramfit.units import MIB

TINY = {"batch": 32, "seq": 128}


def check(made: Plan) -> None:
    """What every plan promises."""
    w = made.workload
    given = {f.name: getattr(w, f.name) for f in fields(w) if f.name not in ("model", "accumulate", "memory")}
    again = estimate(w.model, **given, memory=made.budget_bytes)
    assert again.fits
    assert again.num_retries == 0
    assert again.safe_reserved_bytes == made.estimate.safe_reserved_bytes
    assert again.safe_reserved_bytes <= made.budget_bytes - made.margin_bytes
    assert made.evaluation.safe_reserved_bytes <= made.budget_bytes - made.margin_bytes
    assert made.evaluation.workload.mode == "infer"
    assert (made.accumulate - 1) * made.micro_batch < w.batch <= made.accumulate * made.micro_batch
    assert w.loop == "stepper"
    assert made.step_time_s > 0
    assert all(reason.why for reason in made.reasons)


@pytest.mark.parametrize("memory", ["180MiB", "240MiB", "400MiB"])
@pytest.mark.parametrize("gpu", ["t4", "h200"])
def test_plans_fit_by_an_independent_estimate_at_the_exact_batch(memory: str, gpu: str) -> None:
    made = plan("bert-tiny", gpu=gpu, memory=memory, **TINY)
    check(made)
    assert made.workload.batch == 32
    assert all(t.kind != "different training" for t in used_by(made.workload))


def test_less_memory_is_never_faster() -> None:
    """But for what is given up for simpler settings: a change must bring more than its price."""

    def priced(made: Plan) -> float:
        w = made.workload
        recipe = Recipe(precision=w.precision, optimizer=w.optimizer, checkpointing=w.checkpointing)
        return made.step_time_s * recipe.price()

    times = [priced(plan("bert-mini", gpu="t4", memory=f"{n}MiB", **TINY)) for n in (260, 300, 600, 2000)]
    assert times == sorted(times, reverse=True)


def test_what_was_asked_for_is_kept_and_said() -> None:
    asked = {"precision": "fp32", "micro_batch": 5, "checkpointing": 1, "optimizer": "sgd", "allocator": "default"}
    made = plan("bert-tiny", gpu="t4", **asked, **TINY)
    check(made)
    assert {name: getattr(made.workload, name) for name in asked} == asked
    said = {r.setting.split()[0]: r.why for r in made.reasons}
    assert {name: said[name] for name in asked} == dict.fromkeys(asked, "asked for")


def test_exact_uses_nothing_numeric() -> None:
    made = plan("bert-tiny", gpu="h200", memory="300MiB", exact=True, **TINY)
    check(made)
    assert {t.kind for t in used_by(made.workload)} == {"free"}
    assert made.workload.precision == "fp32"


def test_a_setting_that_costs_quality_says_what() -> None:
    made = plan("bert-mini", gpu="t4", memory="300MiB", **TINY)
    numeric = [r for r in made.reasons if r.kind != "free"]
    assert all(r.cost for r in numeric)


def test_the_margin_can_be_set_and_is_explained() -> None:
    made = plan("bert-tiny", gpu="t4", margin="25%", **TINY)
    assert made.margin_bytes == int(0.25 * made.budget_bytes)
    assert "asked for" in made.margin_reason
    usual = plan("bert-tiny", gpu="h200", memory="4GiB", torch_version="2.11", **TINY)
    assert usual.margin_bytes == int(0.01 * usual.budget_bytes) + int(0.03 * usual.budget_bytes)
    assert "3%" in usual.margin_reason
    assert "1%" in usual.margin_reason
    small = plan("bert-tiny", gpu="h200", memory="1GiB", torch_version="2.11", **TINY)
    assert small.margin_bytes == int(0.01 * small.budget_bytes) + 48 * 2**20
    assert "48.00 MiB" in small.margin_reason
    smallest = plan("bert-tiny", gpu="h200", memory="300MiB", torch_version="2.11", **TINY)
    assert smallest.margin_bytes == int(0.01 * smallest.budget_bytes) + 15 * MIB
    assert "15.00 MiB" in smallest.margin_reason


def test_an_evaluation_comes_after_passes_as_large_as_they_are() -> None:
    """Of two, the second is smaller, and so is what it leaves."""
    job = {"batch": 32, "gpu": "h200", "lengths": [20, 60, 128, 128, 40] * 8}
    made = plan("bert-mini", memory="340MiB", graphs=False, **job)
    assert made.micro_batch == 22
    assert made.evaluation.workload.batch == 64
    assert made.evaluation.safe_reserved_bytes == made.estimate.safe_reserved_bytes


@pytest.mark.parametrize(
    ("gpu", "torch_version", "words"),
    [("h200", "2.11", "compared"), ("h200", "2.13", "over to this torch"), ("t4", "2.11", "over to this GPU")],
)
def test_a_margin_says_what_was_not_measured(gpu: str, torch_version: str, words: str) -> None:
    made = plan("bert-tiny", batch=8, seq=64, gpu=gpu, torch_version=torch_version, memory="2GiB")
    assert words in made.margin_reason


def test_the_mildest_allowed_change_is_made_only_where_nothing_else_fits() -> None:
    roomy = plan("bert-mini", gpu="t4", allow=["freeze", "lora", "int8"], **TINY)
    assert roomy.workload.freeze is None
    assert roomy.workload.lora is None
    with pytest.raises(NoPlanFits) as failed:
        plan("bert-mini", gpu="t4", memory="95MiB", **TINY)
    assert set(failed.value.allow) <= {"freeze", "lora", "int8", "bf16", "adafactor", "sgd"}
    made = plan("bert-mini", gpu="t4", memory="95MiB", allow=failed.value.allow, **TINY)
    check(made)
    changed = [r for r in made.reasons if "allowed" in r.why]
    assert changed
    assert all(r.cost for r in changed if r.kind != "free")


def test_no_plan_names_what_is_missing_and_what_would_do() -> None:
    with pytest.raises(NoPlanFits) as failed:
        plan("bert-base-uncased", gpu="t4", memory="500MiB", batch=4, seq=64, offload=False)
    error = failed.value
    assert error.exit_code == 3
    assert error.best.workload.batch == 4
    assert error.best.fits is False
    assert error.shortfall_bytes == error.best.safe_reserved_bytes + error.margin_bytes - 500 * MIB
    for part in ("bert-base-uncased", "batch 4", "64 tokens", "500.00 MiB"):
        assert part in str(error), part
    assert error.gpu is not None
    assert error.model is not None
    smaller = plan(error.model, gpu="t4", memory="500MiB", batch=4, seq=64, offload=False)
    check(smaller)
    check(plan("bert-base-uncased", gpu=error.gpu, batch=4, seq=64, offload=False))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"precision": "fp16"}, "fp16 cannot train"),
        ({"precision": "amp-bf16"}, "no bfloat16"),
        ({"lora": 8, "freeze": 1}, "lora 8 adapts layers that freeze 1"),
        ({"lora": 8, "freeze": "*.query.weight"}, "takes out of training"),
        ({"checkpointing": 99}, "the model has 2 layers"),
        ({"mode": "infer"}, "a plan is for training"),
        ({"loop": "plain"}, "Stepper"),
        ({"allow": ["frezee"]}, "nearest: freeze"),
        ({"allow": "int8"}, "allow lora or freeze"),
        ({"margin": "a lot"}, "margin 'a lot'"),
        ({"batchh": 3}, "unknown keyword 'batchh'"),
        ({"micro_batch": 5, "accumulate": 2}, "is not batch 32"),
    ],
)
def test_incompatible_things_are_one_clear_error(keywords: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError) as failed:
        plan("bert-tiny", **{"gpu": "t4", **TINY, **keywords})
    assert words in str(failed.value)


def test_a_plan_needs_a_budget() -> None:
    with pytest.raises(WorkloadError, match="gpu or a memory"):
        plan("bert-tiny", **TINY)


def test_memory_alone_is_enough_and_times_name_their_gpu() -> None:
    made = plan("bert-tiny", memory="1GiB", **TINY)
    check(made)
    assert any(note.startswith("times are those of") for note in made.notes)


def test_a_saved_plan_is_read_back(tmp_path: Path) -> None:
    made = plan("bert-tiny", gpu="t4", **TINY)
    made.save(tmp_path / "plan.json")
    assert vramfit.Plan.load(tmp_path / "plan.json") == made
    assert json.loads((tmp_path / "plan.json").read_text())["record"] == "Plan"
    with pytest.raises(VramfitError, match="cannot read"):
        Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize("keywords", [{}, {"precision": "fp32", "checkpointing": "full"}, {"optimizer": "adafactor"}])
def test_training_arguments_are_taken_by_transformers(keywords: dict[str, object], tmp_path: Path) -> None:
    from transformers import TrainingArguments

    made = plan("bert-tiny", **{"gpu": "t4", "memory": "1GiB", **TINY, **keywords}).training_arguments()
    on_cpu = {k: v for k, v in made.items() if k not in ("bf16", "fp16", "tf32")}  # these ask for the GPU itself
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **on_cpu)
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 32
    assert {"bf16", "fp16", "tf32"} <= set(TrainingArguments.__dataclass_fields__)


def test_a_module_of_the_users_is_planned_for() -> None:
    model = torch.nn.Sequential()
    with pytest.raises(VramfitError):
        plan(model, gpu="t4", **TINY)
    from transformers import AutoModelForSequenceClassification, BertConfig

    small = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
    made = plan(AutoModelForSequenceClassification.from_config(small), gpu="t4", memory="400MiB", **TINY)
    assert made.estimate.fits


def test_other_tasks_and_families_have_plans() -> None:
    for model, task in (("albert-base-v2", "token-classification"), ("distilbert-base-uncased", "question-answering")):
        made = plan(model, task=task, gpu="t4", memory="2GiB", batch=8, seq=64)
        check(made)
        assert made.workload.task == task


def test_planning_bert_large_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    work = count_work(monkeypatch)
    made = plan("bert-large-uncased", gpu="t4", batch=32, seq=512)
    assert len(work.depths) <= 8  # models traced; `benchmarks/speed_of_planning.py` has the seconds
    assert len(work.events) <= 80  # streams replayed, of all candidates together
    check(made)


def test_a_refusal_traces_few_models_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    work = count_work(monkeypatch)
    with pytest.raises(NoPlanFits) as failed:
        plan("bert-base-uncased", gpu="t4", memory="150MiB", batch=8, seq=64)
    assert failed.value.gpu == "gtx-1650"
    assert failed.value.model is not None
    assert work.depths.count(12) == 2  # in both precisions, to say what would be needed; not once for each remedy


def test_packed_attention_is_planned_where_it_is_asked_for() -> None:
    made = plan("bert-mini", gpu="h200", memory="400MiB", attention="packed", **TINY)
    check(made)
    assert (made.workload.attention, made.workload.precision) == ("packed", "amp-bf16")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"gpu": 5}, {"allow": 5}, {"lengths": 5}, {"exact": "yes"}, {"trust_remote_code": "no"}, {"steps": 1.5}),
        *({"precision": ["fp32"]}, {"offload": {}}, {"num_gpus": "two"}, {"batch": []}, {"memory": 1.5}),
    ],
)
def test_a_keyword_of_the_wrong_kind_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(VramfitError, match=f"^{next(iter(wrong))} "):
        plan("bert-tiny", **({"gpu": "t4", **TINY} | wrong))


def test_a_split_that_is_refused_for_the_headroom_says_so() -> None:
    """What it would need alone is below the budget."""
    why = plan("bert-tiny", batch=256, seq=128, memory="330MiB", gpu="t4").reasons[0].why
    needs = re.search(r"passes of 128 would need ([\d.]+) MiB, which leaves less than the headroom of 33.00 MiB", why)
    assert needs is not None, why
    assert 330 - 33 < float(needs[1]) <= 330
    why = plan("bert-tiny", batch=256, seq=128, memory="300MiB", gpu="t4").reasons[0].why
    assert "headroom" not in why
