"""What one trace remembers of calls serves others, and changes nothing in them."""

from typing import Any

import pytest
import torch
from tests.unit.trace.recording import H200, Small
from transformers import BertConfig

from vramfit.models.resolve import resolve
from vramfit.records.stream import Stream, Work
from vramfit.trace import calls
from vramfit.trace.run import trace
from vramfit.trace.template import order_of
from vramfit.workload import Workload

TINY = BertConfig(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
)  # fmt: skip
ORDER = [("steady.micro0", 1), ("steady.micro1", 2), ("steady.optimizer", 1)]
JOBS: list[dict[str, Any]] = [
    {},
    {"precision": "amp-bf16", "checkpointing": "full"},
    {"precision": "amp-fp16", "max_grad_norm": 1.0},
    {"precision": "amp-bf16", "attention": "packed"},
    {"freeze": 1, "optimizer": "adamw-8bit"},
    {"lora": 4},
]


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_shared", {})


def run(model: Any = TINY, **keywords: Any) -> tuple[Stream, Work]:
    task = keywords.pop("task", "sequence-classification")
    workload = Workload(model="m", task=task, seq=16, batch=8, accumulate=2, loop="stepper", **keywords)
    template = trace(resolve(model, task=task), workload, H200)
    return template.instantiate(4, order_of(workload)), template.work_at(4, ORDER)


def test_a_trace_is_the_same_whatever_others_have_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = []
    for job in JOBS:
        monkeypatch.setattr(calls, "_shared", {})
        alone.append(run(**job))
    together = [run(**job) for job in [*JOBS, *JOBS]]
    assert together == [*alone, *alone]


def test_a_second_trace_remembers_nothing_new() -> None:
    run()
    num_known = sum(map(len, calls._shared.values()))
    assert num_known > 0
    run()
    assert sum(map(len, calls._shared.values())) == num_known


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    num_known = sum(map(len, calls._shared.values()))
    monkeypatch.setattr(calls, "MAX_REMEMBERED", num_known - 1)
    run(precision="amp-bf16")
    run()
    assert sum(map(len, calls._shared.values())) == num_known


def test_models_that_may_hold_other_tensors_share_nothing() -> None:
    module = Small(torch.nn.Linear(32, 32))
    resolved = resolve(module, task="features")
    trace(resolved, Workload(model="m", task="features", mask="none", seq=16, batch=4), H200)
    run(quantize="int8", lora=4)
    assert calls._shared == {}
