"""Runs without padding: planned where the kernel is, and only there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.runtime.training.small_runs import request_of, run

from vramfit.records.plan import Plan
from vramfit.runtime.training.preparation import make_plan
from vramfit.runtime.training.reading import read_data


def test_an_emulated_gpu_has_no_kernel_for_it(tmp_path: Path) -> None:
    record = run(tmp_path, device="emulated", memory="64MiB", precision="amp-bf16", max_steps=2)
    assert record.settings["attention"] == "sdpa"


def test_a_gpu_that_has_the_kernel_gets_a_packed_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    run_device: Any = SimpleNamespace(device=torch.device("cuda", 0), has_budget=True, emulated=None)
    asked = {"memory": "64MiB", "gpu": "l4", "device": None, "precision": "amp-bf16", "optimizer": "adamw-fused"}
    request = request_of(tmp_path, batch=48, **asked)
    data = read_data(request, None)
    monkeypatch.setattr("vramfit.planner.choose._waits_for_host", lambda estimate: False)  # tiny models do
    made = make_plan(request, data, run_device)
    assert isinstance(made, Plan)
    assert made.workload.attention == "packed"
    again = make_plan(request_of(tmp_path, batch=48, attention="sdpa", **asked), data, run_device)
    assert again is not None
    assert again.workload.attention == "sdpa"


@pytest.mark.parametrize("graphs", [False, True])
def test_passes_are_planned_as_recorded_for_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    run_device: Any = SimpleNamespace(device=torch.device("cuda", 0), has_budget=True, emulated=None)
    asked = {"memory": "1GiB", "gpu": "h200", "device": None, "precision": "amp-bf16", "optimizer": "adamw-fused"}
    request = request_of(tmp_path, batch=48, attention="packed", graphs=graphs, **asked)
    made = make_plan(request, read_data(request, None), run_device)
    assert made is not None
    assert made.workload.graphs is graphs


def test_a_run_whose_passes_are_not_recorded_says_so(tmp_path: Path) -> None:
    asked = {"device": "emulated", "memory": "1GiB", "gpu": "h200", "precision": "amp-bf16", "attention": "packed"}
    record = run(tmp_path, graphs=True, max_steps=2, **asked)
    assert record.settings["graphs"] is True
    assert any("passes are not captured" in note for note in record.notes)


def test_several_processes_plan_for_the_gpu_that_has_least(tmp_path: Path) -> None:
    run_device: Any = SimpleNamespace(
        device=torch.device("cuda", 0), has_budget=True, emulated=None, least_free_bytes=64 * 2**20
    )
    request = request_of(tmp_path, device=None, memory=None, gpu="l4")
    made = make_plan(request, read_data(request, None), run_device)
    assert made is not None
    assert made.budget_bytes == 64 * 2**20
