"""A plan as it is drawn: every part is there, narrow and wide, without colour."""

import ast
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.report.samples import drawn, estimate

from vramfit.errors import NoPlanFits
from vramfit.records.plan import Alternative, InstanceFit, LengthSummary, Plan, Reason
from vramfit.report.plan import (
    estimate_command,
    no_plan_data,
    render_instances,
    render_no_plan,
    render_plan,
    snippet,
    train_command,
    wrap_command,
)
from vramfit.units import GIB, MIB


def sample(**changes: Any) -> Plan:
    made = estimate(
        batch=32, micro_batch=4, loop="stepper", precision="amp-fp16", optimizer="adamw-fused", allocator="expandable"
    )
    evaluation = estimate(batch=64, mode="infer")
    others = [("fp32, adamw-fused", 2, 16, 2.0, 4 * GIB, True), ("fp32, adamw-fused", 32, 1, 1.5, 20 * GIB, False)]
    return Plan(
        **{
            "workload": made.workload,
            "estimate": made,
            "evaluation": evaluation,
            "step_time_s": 0.8,
            "budget_bytes": made.capacity_bytes,
            "margin_bytes": 500 * MIB,
            "margin_reason": "500.00 MiB stay free: 5% since rules are carried over to this GPU",
            "reasons": (
                Reason(setting="micro_batch 4 × 8", kind="free", why="passes of 5 would need 12.00 GiB"),
                Reason(setting="precision amp-fp16", kind="numeric", why="2.5 times as fast", cost="hardly any"),
            ),
            "alternatives": tuple(
                Alternative(
                    settings=s,
                    kind="free",
                    micro_batch=m,
                    accumulate=n,
                    step_time_s=t,
                    safe_reserved_bytes=b,
                    fits=f,
                )
                for s, m, n, t, b, f in others
            ),
            "notes": ("derived: rules are carried over",),
            **changes,
        }
    )


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_part_is_shown_at_any_width(width: int) -> None:
    text = drawn(render_plan(sample()), width)
    for part in ("passes of 4, 8 a step", "40 samples/s", "evaluation, batch 64", "precision amp-fp16", "fewer bits"):
        assert part in text, part
    for part in ("●", "○", "×", "┄", "does not fit", "vramfit.Stepper", "vramfit train", "Derived"):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= max(width, 96)


def test_the_plot_is_at_most_fifteen_lines() -> None:
    lines = drawn(render_plan(sample()), 120).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("Memory and time"))
    end = next(i for i, line in enumerate(lines) if "● this plan" in line)
    assert end - begin <= 15


def test_lengths_are_told() -> None:
    summary = LengthSummary(num_samples=100, mean=40.0, median=30, longest=512, num_truncated=3, source="train.csv")
    assert "Timed on 100 lengths (train.csv)" in drawn(render_plan(sample(lengths=summary)), 120)


def test_what_is_faster_and_was_not_taken_says_why() -> None:
    others = sample().alternatives
    other = replace(others[0], why_not="moments in 8 bits must save 11% of the time to be taken, and save 7%")
    text = " ".join(drawn(render_plan(sample(alternatives=(other, *others[1:]))), 100).split())
    assert f"Not {other.settings}, {other.micro_batch} × {other.accumulate}, although it is faster: moments" in text
    assert "although" not in drawn(render_plan(sample()), 100)


def test_the_command_has_every_setting() -> None:
    command = estimate_command(sample().workload)
    for part in ("--batch 32", "--micro-batch 4", "--precision amp-fp16", "--allocator expandable", "--loop stepper"):
        assert part in command


def test_no_plan_is_a_few_lines_with_what_would_do() -> None:
    failure = NoPlanFits(
        "does not fit",
        best=estimate(batch=32, micro_batch=1, loop="stepper", memory=600 * MIB),
        shortfall_bytes=3 * GIB,
        budget_bytes=600 * MIB,
        margin_bytes=30 * MIB,
        allow=("freeze", "int8"),
        gpu="rtx-2060",
        model="bert-small",
    )
    text = drawn(render_no_plan(failure), 100)
    for part in ("3.00 GiB too little", "--allow freeze,int8", "--gpu rtx-2060", "bert-small", "570.00 MiB"):
        assert part in text, part
    assert no_plan_data(failure)["gpu"] == "rtx-2060"


def test_instances_are_a_table() -> None:
    fits = [
        InstanceFit(
            instance="ml.g4dn.xlarge", gpu="t4", num_gpus=1, budget_bytes=14 * GIB, fits=True, settings="amp-fp16",
            micro_batch=8, accumulate=4, step_time_s=1.5, safe_reserved_bytes=9 * GIB,
        ),
        InstanceFit(
            instance="ml.g5.xlarge", gpu="a10g", num_gpus=1, budget_bytes=22 * GIB, fits=False, settings="too little"
        ),
    ]  # fmt: skip
    text = drawn(render_instances(fits), 120)
    assert "✓  ml.g4dn.xlarge" in text
    assert "✗  ml.g5.xlarge" in text
    assert "8 × 4" in text


@pytest.mark.parametrize(
    "changes", [{}, {"num_gpus": 2, "parallel": "fsdp"}, {"offload": "weights", "checkpointing": "full"}]
)
def test_what_is_to_be_copied_is_whole_at_eighty_columns(changes: dict[str, Any]) -> None:
    workload = replace(sample().workload, micro_batch=None, accumulate=8, **changes)
    shown = drawn(render_plan(sample(workload=workload)), 80)
    for line in (*snippet(workload, "plan.json"), *wrap_command(train_command(workload, "plan.json"))):
        assert f"  {line}".rstrip() in [shown_line.rstrip() for shown_line in shown.splitlines()]


def test_the_python_of_a_plan_is_python() -> None:
    for changes in ({}, {"num_gpus": 2}, {"offload": "weights", "checkpointing": "full"}):
        lines = snippet(replace(sample().workload, micro_batch=None, **changes), "p.json")
        called = [node.func for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Call)]
        assert any(isinstance(func, ast.Attribute) and func.attr == "step" for func in called)
        assert [line for line in lines if "import" in line] == ["import vramfit"]


def test_no_figure_of_an_instance_is_cut_at_eighty_columns() -> None:
    fit = InstanceFit(
        instance="ml.p6-b200.48xlarge",
        gpu="a100-40gb",
        num_gpus=8,
        budget_bytes=139 * GIB,
        fits=True,
        settings="amp-fp16, adamw-fused",
        micro_batch=32,
        accumulate=1,
        step_time_s=0.0449,
        safe_reserved_bytes=172 * MIB,
    )
    row = next(line for line in drawn(render_instances([fit]), 80).splitlines() if "ml.p6" in line)
    shown = "ml.p6-b200.48xlarge a100-40gb 32 × 1 44.9 ms 172.00 MiB amp-fp16, adamw-fused"
    assert " ".join(row.split()[1:]) == shown
