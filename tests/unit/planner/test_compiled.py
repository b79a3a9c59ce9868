"""Compiled layers in plans: where they were asked for, or where a run is long enough."""

from typing import Any

import pytest

from vramfit.errors import WorkloadError
from vramfit.planner.plan import plan

JOB: dict[str, Any] = {"batch": 256, "seq": 128, "gpu": "l4", "memory": "4GiB"}


def test_layers_are_compiled_where_that_pays() -> None:
    job: dict[str, Any] = {"precision": "amp-bf16", "optimizer": "adamw-fused", **JOB}
    short, long = (plan("bert-mini", steps=steps, **job) for steps in (100, 100_000))
    assert short.workload.compile is False
    assert long.workload.compile is True
    assert long.step_time_s < short.step_time_s
    assert long.estimate.safe_reserved_bytes <= long.budget_bytes - long.margin_bytes
    (said,) = [r for r in long.reasons if r.setting == "compile True"]
    assert (said.kind, "faster" in said.why, bool(said.cost)) == ("numeric", True, True)
    assert any("before the first step" in note for note in long.notes)


def test_what_was_asked_for_is_kept() -> None:
    fixed: dict[str, Any] = {"precision": "amp-bf16", "optimizer": "adamw-fused", **JOB}
    assert plan("bert-tiny", compile=False, steps=10**6, **fixed).workload.compile is False
    asked = plan("bert-tiny", compile=True, **fixed)
    assert asked.workload.compile is True
    assert "asked for" in {r.setting: r.why for r in asked.reasons}["compile True"]
    assert asked.evaluation.workload.compile is True


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"compile": True, "exact": True}, "exact and compile"),
        ({"compile": True, "offload": "optimizer"}, "compile and offload optimizer"),
        ({"compile": True, "quantize": "int8", "lora": 8}, "compile and quantize int8"),
        ({"steps": 0}, "steps 0"),
    ],
)
def test_what_does_not_go_together_is_named(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        plan("bert-tiny", **JOB, **keywords)
