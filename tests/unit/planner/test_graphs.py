"""Plans whose passes are recorded: where steps wait for the host, and nothing speaks against it."""

from typing import Any

import pytest
from tests.unit.planner.made import plan

from vramfit.estimator.predict import estimate
from vramfit.records.codec import from_json, to_json
from vramfit.records.plan import Plan
from vramfit.workload import Workload

MIB = 2**20
JOB: dict[str, Any] = {"batch": 32, "gpu": "h200", "memory": "4GiB", "lengths": [20, 60, 128, 128, 40] * 8}
PACKED: dict[str, Any] = {"attention": "packed", "precision": "amp-bf16", "optimizer": "adamw-fused", "loop": "stepper"}


def make(model: str = "bert-mini", **keywords: Any) -> Plan:
    return plan(model, **(JOB | keywords))


def test_passes_are_recorded_where_that_is_asked_for() -> None:
    recorded, plain = make(graphs=True), make(steps=10**5, graphs=False)
    assert recorded.workload.graphs
    assert not plain.workload.graphs
    assert make(steps=10**5).workload.graphs
    assert recorded.step_time_s < plain.step_time_s
    assert any(reason.setting == "graphs True" for reason in recorded.reasons)
    assert recorded.estimate.safe_reserved_bytes <= recorded.budget_bytes - recorded.margin_bytes


def test_an_evaluation_is_given_the_memory_of_recorded_passes() -> None:
    recorded, plain = (make(graphs=graphs, attention="packed") for graphs in (True, False))
    assert recorded.workload.graphs
    workspaces = 2 * (32 + 1) * MIB  # of the stream that passes are recorded on, for forward's thread and backward's
    more = recorded.evaluation.peak_allocated_bytes - plain.evaluation.peak_allocated_bytes
    assert more == workspaces
    reserved = recorded.evaluation.peak_reserved_bytes - plain.evaluation.peak_reserved_bytes
    assert 0 < reserved <= 82 * MIB  # in segments of their own, of pages of 20 MiB and of 2; nothing else is cached


def test_an_evaluation_finds_nothing_cached_after_recorded_passes() -> None:
    recorded = make(steps=10**5, memory="500MiB")
    assert recorded.workload.graphs
    assert recorded.evaluation.workload.batch == 64
    assert recorded.evaluation.safe_reserved_bytes < recorded.estimate.safe_reserved_bytes - 20 * MIB


def test_passes_are_not_recorded_where_little_is_left_for_other_lengths() -> None:
    """A run inside a budget like that gave back its cache seven times a step, and took ten times as long."""
    small = {"memory": "360MiB", "torch_version": "2.11"}
    made, asked = (make(**small, **keywords) for keywords in ({"steps": 10**5}, {"graphs": True}))
    assert not made.workload.graphs
    assert "18.00 MiB since batches of varied lengths fragment memory" in made.margin_reason
    assert asked.workload.graphs
    assert asked.step_time_s > made.step_time_s


@pytest.mark.parametrize(
    "keywords", [{"checkpointing": "full"}, {"precision": "amp-fp16"}, {"attention": "sdpa"}], ids=str
)
def test_what_does_not_go_with_it_leaves_it_out_and_says_so(keywords: dict[str, Any]) -> None:
    made = make(graphs=True, **keywords)
    assert not made.workload.graphs
    assert any("passes are not captured" in note for note in made.notes)


@pytest.mark.parametrize(("allocator", "basis"), [("expandable", "verified"), ("default", "derived")])
def test_segments_of_fixed_size_were_not_measured(allocator: str, basis: str) -> None:
    keywords = {"batch": 8, "seq": 32, "gpu": "h200", "torch_version": "2.11", "allocator": allocator, **PACKED}
    made = estimate("bert-tiny", graphs=True, **keywords)
    assert made.basis == basis
    assert any("recorded passes and fused layers were measured" in n for n in made.notes) is (basis == "derived")


def test_gradients_that_stay_are_predicted() -> None:
    keywords = {"batch": 8, "seq": 128, "gpu": "h200", "allocator": "expandable", **PACKED}
    plain, recorded = (estimate("bert-base-uncased", graphs=graphs, **keywords) for graphs in (False, True))
    weights = 4 * 109_483_778
    assert 0.5 * weights < recorded.peak_allocated_bytes - plain.peak_allocated_bytes < 1.5 * weights
    assert recorded.breakdown["weights"] == plain.breakdown["weights"]
    assert recorded.breakdown["gradients"] == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"attention": "sdpa"}, "packed training passes"),
        ({"checkpointing": 1}, "graphs and checkpointing"),
        ({"optimizer": "adamw"}, "optimizer adamw needs more"),
        ({"precision": "amp-fp16"}, "not amp-fp16"),
        ({"task": "question-answering"}, "not for question-answering"),
        ({"offload": "optimizer"}, "graphs and offload optimizer"),
        ({"num_gpus": 2}, "one GPU"),
        ({"quantize": "int8", "lora": 8}, "graphs and quantize int8"),
    ],
)
def test_a_workload_that_contradicts_itself_is_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Workload(model="bert-base-uncased", **({"graphs": True} | PACKED | keywords))


def test_a_plan_is_read_back() -> None:
    made = make(graphs=True)
    assert from_json(Plan, to_json(made)) == made


def test_neither_yes_nor_no_is_refused() -> None:
    with pytest.raises(ValueError, match="graphs 'no' is not True or False"):
        make(graphs="no")
