"""A step of a run is written down as it goes, and lies over its prediction."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.training.small_runs import run, write_model

from vramfit.emulator.gpu import EmulatedGPU
from vramfit.estimator.predict import estimate
from vramfit.records.codec import from_json
from vramfit.records.run import COURSE_FILE, StepCourse, sample
from vramfit.runtime.device import RunDevice
from vramfit.runtime.stepper import Stepper
from vramfit.runtime.training.outcome import MAX_KEPT, MemoryHistory, live_after


def test_a_run_on_the_emulated_gpu_leaves_the_course_of_a_step(tmp_path: Path) -> None:
    model = write_model(tmp_path / "source", hidden_size=64, intermediate_size=256)
    run(tmp_path, device="emulated", memory="64MiB", epochs=1, batch=16)
    course = from_json(StepCourse, (tmp_path / "out" / COURSE_FILE).read_text())
    assert course.step >= 2
    assert course.num_events > 300
    predicted = estimate(
        str(model), batch=course.batch, seq=course.seq, gpu="h200", loop="stepper", optimizer="adamw-fused"
    )
    workspaces = max(p.breakdown.get("workspaces", 0) for p in predicted.timeline)
    most = max(p.requested_bytes for p in predicted.timeline) - workspaces
    assert 0.9 * most <= max(course.requested_bytes) <= most  # CUDA's kernels have temporaries that a CPU's do not


def test_on_the_cpu_nothing_is_recorded(tmp_path: Path) -> None:
    run(tmp_path, epochs=1, batch=16)
    assert not (tmp_path / "out" / COURSE_FILE).exists()


def test_a_step_whose_passes_are_replayed_asks_for_nothing_and_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stepper, "uses_graphs", property(lambda stepper: True))
    run(tmp_path, device="emulated", memory="64MiB", epochs=1, batch=16)
    assert not (tmp_path / "out" / COURSE_FILE).exists()


def test_only_larger_batches_are_recorded_and_not_many() -> None:
    run_device = RunDevice("emulated", memory="64MiB")
    history = MemoryHistory(run_device)

    def taken(number: int, batch: int) -> bool:
        with history.step(number, batch, batch, 8) as found, run_device.active():
            torch.zeros(1024)
        return bool(found)

    assert [taken(n, b) for n, b in ((1, 4), (2, 4), (3, 4), (4, 2), (5, 8))] == [False, True, False, False, True]
    assert [taken(n, 2**n) for n in range(6, 12)].count(True) == MAX_KEPT - 2


def test_the_emulated_gpu_writes_down_what_is_requested() -> None:
    course: list[int] = []
    with EmulatedGPU(memory="64MiB") as gpu, gpu.recorded(course):
        kept = torch.zeros(1000)
        torch.ones(500)
    assert kept.numel() == 1000
    assert course == [4000, 6000, 4000]


def test_pytorchs_own_trace_is_read_request_by_request() -> None:
    events: list[dict[str, Any]] = [
        {"action": "segment_alloc", "size": 2**21},
        {"action": "alloc", "size": 512},
        {"action": "alloc", "size": 100},
        {"action": "free_requested", "size": 512},
        {"action": "free_completed", "size": 512},
    ]
    assert list(live_after(1000, events)) == [1512, 1612, 1100]


def test_a_course_is_sampled_without_losing_its_peak() -> None:
    assert max(sample([*range(1000), 5000, *range(1000)], 20)) == 5000
    assert sample([], 20) == ()


def test_a_packed_step_is_recorded_with_its_lengths(tmp_path: Path) -> None:
    run(
        tmp_path,
        epochs=1,
        batch=16,
        micro_batch=8,
        attention="packed",
        precision="amp-bf16",
        device="emulated",
        memory="256MiB",
    )
    course = from_json(StepCourse, (tmp_path / "out" / COURSE_FILE).read_text())
    assert len(course.lengths) == course.batch == 16
    assert len(set(course.lengths)) > 1
    assert course.micro_batch == 8


def test_a_course_names_the_workload_of_its_size() -> None:
    course = StepCourse(
        step=2, device="cuda:0", batch=3, micro_batch=2, seq=10, num_events=1, requested_bytes=(1,), lengths=(9, 4, 6)
    )
    assert course.size == {"batch": 3, "micro_batch": None, "seq": 10, "accumulate": None, "lengths": (9, 4, 6)}
    larger = replace(course, lengths=(10, 10, 5))  # more than a pass may hold
    assert larger.size == {"batch": 3, "micro_batch": 2, "seq": 10, "accumulate": None}
    assert replace(course, lengths=()).size == {"batch": 3, "micro_batch": 2, "seq": 10, "accumulate": None}
