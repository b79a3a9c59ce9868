"""Plans for an emulated GPU: of what fits, what is quick on a CPU, unless a setting is named."""

from typing import Any

import pytest

from vramfit.planner.plan import plan
from vramfit.planner.request import REHEARSAL
from vramfit.records.plan import Plan

JOB: dict[str, Any] = {"batch": 32, "seq": 128}


def rehearsed(memory: str, **changes: Any) -> Plan:
    made = plan("bert-mini", memory=memory, rehearses=True, **JOB, **changes)
    assert REHEARSAL in made.notes
    return made


@pytest.mark.parametrize(
    ("memory", "on_a_gpu", "here"),
    [
        ("300MiB", ("adamw-8bit", 3), ("adamw-fused", 3)),
        ("400MiB", ("adamw-fused", 2), ("adamw-fused", None)),
        ("220MiB", ("adamw-8bit", "full"), ("adamw-8bit", "full")),  # nothing else fits
    ],
)
def test_what_is_slow_on_a_cpu_is_taken_only_where_nothing_else_fits(memory: str, on_a_gpu: Any, here: Any) -> None:
    usual = plan("bert-mini", memory=memory, precision="fp32", **JOB)
    assert (usual.workload.optimizer, usual.workload.checkpointing) == on_a_gpu
    made = rehearsed(memory)
    assert (made.workload.optimizer, made.workload.checkpointing) == here
    assert made.workload.precision == "fp32"


def test_what_is_named_is_kept_in_a_rehearsal() -> None:
    asked = {"optimizer": "adamw-8bit", "precision": "amp-bf16", "checkpointing": "full"}
    made = rehearsed("600MiB", **asked)
    assert {name: getattr(made.workload, name) for name in asked} == asked


def test_a_long_rehearsal_is_neither_compiled_nor_packed_nor_recorded() -> None:
    made = rehearsed("2GiB", steps=10**6, lengths=[24, 40, 64, 128] * 100, gpu="l4")
    w = made.workload
    assert (w.compile, w.graphs, w.attention) == (False, False, "sdpa")
    assert REHEARSAL not in plan("bert-mini", memory="2GiB", **JOB).notes
