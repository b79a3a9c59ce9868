"""Plans without padding: chosen where lengths vary and model, precision and GPU can; certified for any row."""

from random import Random
from typing import Any

import pytest
import torch
from tests.unit.planner.made import plan
from transformers import BertConfig, DebertaV2Config, ModernBertConfig

from vramfit import Stepper, estimate, load
from vramfit.errors import VramfitError
from vramfit.planner import choose
from vramfit.planner import plan as planner
from vramfit.planner.job import Job
from vramfit.planner.predictions import safe_bytes
from vramfit.planner.recipes import Proposal, recipes
from vramfit.planner.request import Request
from vramfit.records.plan import Plan
from vramfit.step.splitting import packed_rows
from vramfit.techniques import packing
from vramfit.trace.template import order_of
from vramfit.units import format_bytes
from vramfit.workload import Workload

VARIED = Random(3).choices([24, 40, 64, 128, 256], k=400)
DEBERTA = DebertaV2Config(hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=64)
"""Its attention is code of its own."""
JOB: dict[str, Any] = {"batch": 512, "gpu": "l4", "memory": "6GiB", "lengths": VARIED}


def test_varied_lengths_are_packed_and_it_is_said_why() -> None:
    made = plan("bert-mini", **JOB)
    assert (made.workload.attention, made.workload.precision) == ("packed", "amp-bf16")
    said = {r.setting: r.why for r in made.reasons}
    assert "would be padding" in said["attention packed"]
    assert "tokens" in said[f"micro_batch {made.micro_batch}"]
    assert made.estimate.safe_reserved_bytes <= made.budget_bytes - made.margin_bytes
    padded = plan("bert-mini", attention="sdpa", **JOB)
    assert made.step_time_s < padded.step_time_s
    assert made.margin_bytes >= padded.margin_bytes
    with pytest.raises(VramfitError, match="nothing like attention packed"):
        made.training_arguments()


def test_padded_passes_that_could_not_be_faster_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Proposal] = []

    def fastest(job: Job, proposal: Proposal, *found: Any) -> Any:
        looked_at.append(proposal)
        return whole(job, proposal, *found)

    whole = choose.fastest
    monkeypatch.setattr(choose, "fastest", fastest)
    job = JOB | {"batch": 16, "gpu": "h200"}
    made = planner.plan("bert-base-uncased", **job)
    assert [proposal.packs for proposal in looked_at] == [True]
    monkeypatch.setattr(choose, "least_padded", lambda job, recipe: 0.0)
    among_all = planner.plan("bert-base-uncased", **job)
    assert [proposal.packs for proposal in looked_at] == [True, True, False]
    assert made.num_predicted < among_all.num_predicted
    assert among_all.workload == made.workload
    assert (among_all.step_time_s, among_all.alternatives) == (made.step_time_s, made.alternatives)
    assert among_all.estimate.safe_reserved_bytes == made.estimate.safe_reserved_bytes


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("bert-mini", {"gpu": "t4"}),
        ("bert-mini", {"precision": "tf32"}),
        ("bert-mini", {"exact": True}),
        ("bert-mini", {"lengths": [256] * 64, "fused": False}),
        ("electra-small-discriminator", {"lengths": [256] * 64, "compile": True, "memory": "20GiB", "batch": 64}),
        ("bert-mini", {"lengths": None, "seq": 256}),
        ("bert-mini", {"attention": "sdpa"}),
        (DEBERTA, {"memory": "2GiB", "batch": 64}),
    ],
)
def test_where_nothing_is_gained_or_no_kernel_is_there_batches_stay_padded(model: Any, changes: dict[str, Any]) -> None:
    assert plan(model, **(JOB | changes)).workload.attention != "packed"


def masked(**changes: Any) -> Plan:
    """A plan for long texts of a model whose layers each make a mask of their own."""
    config = ModernBertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=192)
    return plan(config, **({"batch": 16, "seq": 4096, "gpu": "a10g", "memory": "1500MiB"} | changes))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "planned where lengths are known (--lengths, --data)"),
        ({"gpu": "t4"}, "its kernel needs a GPU of sm_80 or newer"),
        ({"exact": True}, "its kernel computes in 16 bits, not in fp32"),
    ],
)
def test_where_masks_take_much_a_padded_plan_says_why_it_is_not_packed(changes: dict[str, Any], why: str) -> None:
    made = masked(**changes)
    (said,) = [r.why for r in made.reasons if r.setting == "attention sdpa"]
    assert f"packed attention has no mask, which takes {format_bytes(made.estimate.mask_bytes)} here, but" in said
    assert why in said


def test_where_masks_take_much_full_lengths_are_packed_if_that_is_faster() -> None:
    made = masked(lengths=[4096] * 64)
    assert made.workload.attention == "packed"
    assert "need no mask" in next(r.why for r in made.reasons if r.setting == "attention packed")
    assert made.step_time_s <= masked(lengths=[4096] * 64, attention="sdpa").step_time_s


def test_where_the_host_is_too_slow_fewer_tokens_are_no_reason() -> None:
    job = JOB | {"batch": 16, "gpu": "h200", "fused": False}
    made = plan("bert-tiny", **job)
    assert made.workload.attention == "sdpa"
    assert made.step_time_s <= plan("bert-tiny", attention="packed", **job).step_time_s


def test_layers_that_can_be_fused_are_packed_without_any_padding() -> None:
    made = plan("bert-mini", **(JOB | {"lengths": [256] * 64}))
    assert (made.workload.attention, made.workload.fused) == ("packed", True)
    assert "as fused layers take them" in {r.setting: r.why for r in made.reasons}["attention packed"]
    plain = plan("bert-mini", **(JOB | {"lengths": [256] * 64, "fused": False}))
    assert made.step_time_s < plain.step_time_s
    assert not plain.workload.fused


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("albert-base-v2", {"memory": "20GiB", "batch": 64}),
        ("bert-mini", {"compile": True}),
        ("bert-mini", {"allow": ("lora",), "lora": 8}),
        ("bert-mini", {"precision": "bf16"}),
        ("bert-mini", {"fused": False}),
    ],
    ids=str,
)
def test_other_packed_plans_have_plain_layers(model: str, changes: dict[str, Any]) -> None:
    made = plan(model, **(JOB | changes))
    assert (made.workload.attention, made.workload.fused) == ("packed", False)


def test_passes_are_recorded_where_the_host_is_about_as_slow_as_the_device() -> None:
    job = JOB | {"batch": 64, "gpu": "h200", "memory": "11GiB"}
    assert not plan("bert-small", **job).workload.graphs  # nobody says that the run is long
    made = plan("bert-small", **job, steps=2000)
    assert made.workload.graphs
    assert made.step_time_s < plan("bert-small", **job, steps=2000, graphs=False).step_time_s
    assert not plan("bert-small", **job, steps=100).workload.graphs
    busy = plan("bert-large-uncased", **(job | {"batch": 512, "memory": "40GiB"}), steps=2000)
    assert busy.workload.fused
    assert not busy.workload.graphs


def test_a_pass_is_as_large_as_real_batches_need() -> None:
    made = plan("bert-mini", **(JOB | {"memory": "16GiB"}))
    tokens = made.micro_batch * made.workload.seq
    mean = 512 * sum(VARIED) / len(VARIED)
    assert mean < tokens < 1.6 * mean


@pytest.mark.parametrize("task", ["question-answering", "token-classification", "masked-lm"])
def test_other_heads_are_packed_too(task: str) -> None:
    made = plan("bert-tiny", task=task, **JOB)
    assert made.workload.attention == "packed"
    assert made.evaluation.workload.attention == ("sdpa" if task == "masked-lm" else "packed")
    if task == "question-answering":
        assert any("own tokens" in r.why for r in made.reasons)


@pytest.mark.parametrize("task", ["sequence-classification", "question-answering", "token-classification"])
@pytest.mark.parametrize("checkpointing", [None, "full"])
def test_no_row_of_a_step_takes_more_than_is_predicted_for_full_samples(task: Any, checkpointing: Any) -> None:
    """A step of 64 samples in passes of 8 × 256 tokens: whatever lengths meet in a row, it is within the prediction."""
    shared: dict[str, Any] = {"task": task, "precision": "amp-bf16", "optimizer": "adamw-fused", "loop": "stepper"}
    shared |= {"attention": "packed", "gpu": "h200", "checkpointing": checkpointing, "allocator": "expandable"}
    bound = estimate("bert-small", batch=64, micro_batch=8, seq=256, **shared)
    rows = [(256,) * 8, (32,) * 64, (256, *(28,) * 63), (200,) * 10, (8,) * 64]
    for lengths in rows:
        assert sum(lengths) <= 8 * 256 + 4
        row = estimate("bert-small", batch=len(lengths), lengths=lengths, seq=256, **shared)
        assert row.peak_requested_bytes <= bound.peak_requested_bytes
        assert row.peak_allocated_bytes <= bound.peak_allocated_bytes * 1.0005


def test_a_stepper_follows_a_packed_plan() -> None:
    made = plan("bert-tiny", **JOB)
    model, _ = load("bert-tiny", random_weights=True, device="cpu")
    stepper = Stepper(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-4), plan=made)
    assert packing.is_applied(model)
    lengths = torch.tensor([9, 40, 3, 17])
    mask = (torch.arange(40) < lengths[:, None]).long()
    ids = torch.randint(1000, 30000, (4, 40))
    loss = stepper.step({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0])})
    assert 0.1 < loss < 3


def test_the_last_row_of_a_step_is_no_fuller_than_is_predicted() -> None:
    draw, seq = Random(5), 64
    for _ in range(2000):
        batch = draw.randint(2, 24)
        micro_batch = draw.randint(2, batch)
        shortest = draw.choice((1, 40, 60, 64))
        rows = packed_rows([draw.randint(shortest, seq) for _ in range(batch)], micro_batch * seq)
        workload = Workload(
            model="m", batch=batch, micro_batch=micro_batch, seq=seq, attention="packed", loop="stepper"
        )
        turns = [turn for turn in order_of(workload, 0, micro_batch) if turn[0].startswith("first.micro")]
        sizes = [turn[2] if len(turn) > 2 else micro_batch for turn in turns]
        assert len(rows) <= len(sizes)
        assert all(tokens <= size * seq for tokens, size in zip(rows, sizes, strict=False))


def test_layers_that_can_be_fused_are_not_compiled() -> None:
    job = {"batch": 8, "gpu": "h200", "memory": "8GiB", "lengths": VARIED}
    made = plan("bert-base-uncased", **job, steps=20_000)
    assert (made.workload.compile, made.workload.fused, made.workload.graphs) == (False, True, True)
    assert plan("modernbert-base", **job, steps=20_000, graphs=False).workload.compile


def test_recorded_passes_that_are_not_asked_for_change_no_optimizer() -> None:
    """Of BERT-base's width; the first two budgets hold recorded passes beside 8-bit moments only."""
    four = BertConfig(num_hidden_layers=4)
    for memory, is_recorded in (("1GiB", True), ("1.2GiB", True), ("1.4GiB", False)):
        job = {"batch": 48, "gpu": "h200", "memory": memory, "lengths": VARIED, "steps": 20_000}
        plain, made = plan(four, **job, graphs=False), plan(four, **job)
        assert made.workload.graphs == is_recorded
        assert made.workload.optimizer == plain.workload.optimizer


@pytest.mark.parametrize("changes", [{"compile": True}, {"lora": 8}, {"precision": "tf32"}, {"gpu": "t4"}], ids=str)
def test_fused_that_cannot_be_is_said(changes: dict[str, Any]) -> None:
    made = plan("bert-mini", **(JOB | {"fused": True} | changes))
    assert not made.workload.fused
    assert any("layers are not fused" in note for note in made.notes)
    assert not any("layers are not fused" in note for note in plan("bert-mini", **(JOB | changes)).notes)


def test_where_fused_layers_take_too_much_plain_ones_are_packed() -> None:
    """Sums of gradients over rows take some MiB, which tells where every layer is computed again."""
    job: dict[str, Any] = {"gpu": "h200", "attention": "packed", "precision": "amp-bf16", "lengths": [128] * 8}
    job |= {"batch": 2, "micro_batch": 1, "checkpointing": "full", "freeze": "embeddings", "optimizer": "sgd"}
    job |= {"offload": False, "margin": 0}
    fused, plain = (plan("bert-base-uncased", **job, memory="8GiB", fused=is_fused) for is_fused in (True, False))
    limits = [made.estimate.safe_reserved_bytes for made in (plain, fused)]
    assert limits[0] < limits[1]
    made = plan("bert-base-uncased", **job, memory=sum(limits) // 2)
    assert not made.workload.fused


def test_a_row_may_hold_every_text_of_every_sample() -> None:
    """What attention holds for each sequence is looked at for as many as a whole prediction has."""
    sizes: dict[str, Any] = {"task": "reranking", "loss": "bce", "texts": 8, "batch": 64, "seq": 64, "gpu": "l4"}
    job = Job.of("bert-tiny", Request.of({**sizes, "attention": "packed"}))
    recipe = recipes(job, Proposal())[0]
    whole = estimate("bert-tiny", **sizes, **recipe.keywords(), micro_batch=64, loop="stepper")
    assert safe_bytes(job, recipe, 64) == whole.safe_reserved_bytes
