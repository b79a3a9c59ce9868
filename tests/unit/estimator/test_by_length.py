"""What a step does at other lengths is what a trace of the whole model says, and so are plans made with it."""

import random
from dataclasses import replace
from typing import Any

import pytest

from vramfit.estimator import shallow as by_length
from vramfit.estimator.resolve import resolve_workload
from vramfit.estimator.shallow import WorkByLength
from vramfit.estimator.traced import TracedWorkload, collection_paused
from vramfit.planner import varied
from vramfit.planner.plan import plan
from vramfit.trace.template import StreamTemplate

JOB = {"batch": 8, "accumulate": 2, "seq": 128, "gpu": "a100-40gb", "loop": "stepper", "optimizer": "adamw-fused"}


def traced_of(model: str, **keywords: Any) -> TracedWorkload:
    return resolve_workload(model, {**JOB, **keywords})[0]


def whole_at(traced: TracedWorkload, seq: int) -> StreamTemplate:
    return replace(traced, workload=replace(traced.workload, seq=seq)).template(2)


@pytest.mark.parametrize(
    "keywords",
    [
        {"precision": "amp-fp16", "max_grad_norm": 1.0},
        {"precision": "amp-bf16", "checkpointing": "full"},
        {"precision": "amp-bf16", "attention": "packed"},
        {"precision": "amp-bf16", "compile": True},
        {"task": "token-classification"},
        {"freeze": "embeddings", "attention": "eager"},
    ],
    ids=lambda keywords: " ".join(map(str, keywords.values())),
)
def test_two_shallow_models_show_the_work_of_a_deep_one(keywords: dict[str, Any]) -> None:
    with collection_paused():
        traced = traced_of("bert-base-uncased", **keywords)
        made = WorkByLength(traced, 2).template(64)
        assert not made.segments  # no trace of the whole model
        whole = whole_at(traced, 64)
        order = [("steady.micro0", 1), ("steady.micro1", 3), ("steady.optimizer", 1)]
        for batch in (2, 7):
            assert made.work_at(batch, order) == whole.work_at(batch, order)


@pytest.mark.parametrize(
    ("model", "keywords"),
    [
        ("modernbert-base", {}),  # every third layer sees all tokens
        ("bert-base-uncased", {"checkpointing": 3}),
        ("bert-base-uncased", {"freeze": 5}),
        ("distilbert-base-uncased", {}),  # too few layers to be worth it
    ],
)
def test_where_layers_differ_the_whole_model_is_traced(model: str, keywords: dict[str, Any]) -> None:
    with collection_paused():
        traced = traced_of(model, **keywords)
        assert WorkByLength(traced, 2).template(64) is whole_at(traced, 64)


def depths_traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(layers, tokens) of what is traced from now on."""
    seen: list[tuple[int, int]] = []
    real = TracedWorkload.trace

    def watched(self: TracedWorkload, batch: int | None) -> StreamTemplate:
        seen.append((self.resolved.config.num_hidden_layers, self.workload.seq))
        return real(self, batch)

    monkeypatch.setattr(TracedWorkload, "trace", watched)
    return seen


def test_once_layers_add_up_one_of_them_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with collection_paused():
        traced = traced_of("bert-base-uncased")
        traced.template(2)
        seen = depths_traced(monkeypatch)
        lengths = WorkByLength(traced, 2)
        for seq in (64, 32, 64):
            lengths.template(seq)
        assert seen == [(1, 128), (2, 128), (1, 64), (1, 32)]


def test_one_that_calls_something_else_at_another_length_will_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with collection_paused():
        traced = traced_of("bert-base-uncased")
        whole = whole_at(traced, 64)
        monkeypatch.setattr(by_length, "_called_alike", lambda left, right: False)
        made = WorkByLength(traced, 2).template(64)
        order = [("steady.micro0", 1), ("steady.micro1", 3)]
        assert not made.segments
        assert made.work_at(7, order) == whole.work_at(7, order)


def test_layers_that_do_not_add_up_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with collection_paused():
        traced = traced_of("bert-base-uncased")
        monkeypatch.setattr(by_length, "num_layers_of", lambda resolved: 13)
        assert WorkByLength(traced, 2).template(64) is whole_at(traced, 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keywords",
    [
        {"gpu": "t4", "batch": 8},
        {"gpu": "t4", "memory": "3GiB", "batch": 32},
        {"gpu": "a100-40gb", "batch": 64, "task": "token-classification"},
    ],
    ids=["one pass", "several passes", "packed"],
)
def test_plans_are_those_made_with_whole_traces(keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    lengths = [draw.randint(20, 512) for _ in range(300)]
    made = plan("bert-base-uncased", lengths=lengths, **keywords)
    monkeypatch.setattr(by_length, "WORTHWHILE_LAYERS", 10**6)
    monkeypatch.setattr(varied, "least_on_lengths", lambda *_: 0.0)
    whole = plan("bert-base-uncased", lengths=lengths, **keywords)
    for part in ("workload", "step_time_s", "reasons", "alternatives", "num_predicted", "evaluation"):
        assert getattr(made, part) == getattr(whole, part), part
    assert made.estimate.safe_reserved_bytes == whole.estimate.safe_reserved_bytes
