"""Plans are those that traces of every layer, and of whole steps at every length, would give."""

import random
from dataclasses import replace
from typing import Any

import pytest

from vramfit.estimator import traced
from vramfit.estimator.traced import TracedWorkload
from vramfit.planner import varied
from vramfit.planner.plan import plan
from vramfit.trace import unrolling
from vramfit.trace.template import StreamTemplate


def whole_steps(self: TracedWorkload, seq: int, micro_batch: int, _: Any) -> StreamTemplate:
    return replace(self, workload=replace(self.workload, seq=seq)).template(micro_batch)


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
    traced._kept.clear()
    monkeypatch.setattr(unrolling, "find_zones", lambda model: ())
    monkeypatch.setattr(TracedWorkload, "work_by_length", whole_steps)
    monkeypatch.setattr(traced, "WORTHWHILE_LAYERS", 10**6)
    monkeypatch.setattr(varied, "least_on_lengths", lambda *_: 0.0)
    whole = plan("bert-base-uncased", lengths=lengths, **keywords)
    traced._kept.clear()
    for part in ("workload", "step_time_s", "reasons", "alternatives", "num_predicted", "evaluation"):
        assert getattr(made, part) == getattr(whole, part), part
    assert made.estimate.safe_reserved_bytes == whole.estimate.safe_reserved_bytes
