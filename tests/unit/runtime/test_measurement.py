import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vramfit.errors import WorkloadError
from vramfit.monitor.sources import AllocatorCounts
from vramfit.records.codec import from_json, to_json
from vramfit.records.measurement import Measurement, PhaseMeasurement
from vramfit.runtime import measurement as module
from vramfit.runtime.measurement import MeasurementError, measure, run_workload
from vramfit.workload import Workload

WORKLOAD = Workload(model="bert-tiny", batch=2, seq=16)


def peaks(size: int) -> PhaseMeasurement:
    return PhaseMeasurement(peak_requested_bytes=size, peak_allocated_bytes=2 * size, peak_reserved_bytes=3 * size)


def measurement(workload: Workload = WORKLOAD) -> Measurement:
    return Measurement(
        workload=workload,
        gpu="NVIDIA H200",
        compute_capability=(9, 0),
        total_memory_bytes=150_109_945_856,
        torch_version="2.11.0+cu130",
        transformers_version="5.17.0",
        driver_version=None,
        phases={"load": peaks(1), "inputs": peaks(2), "first_step": peaks(9), "steady_step": peaks(8)},
        steps=(peaks(9), peaks(8), peaks(7)),
        step_times_s=(3.0, 0.1, 0.3),
        num_retries=0,
        num_ooms=0,
        reserved_bytes=27,
        process_bytes=100,
        out_of_memory=None,
    )


class FakeRun:
    """Stands for `subprocess.run`; keeps how it was called."""

    def __init__(self, stdout: str = "", *, stderr: str = "", code: int = 0) -> None:
        self._answer = (stdout, stderr, code)
        self.command: list[str] = []
        self.given: dict[str, Any] = {}

    def __call__(self, command: list[str], **given: Any) -> "subprocess.CompletedProcess[str]":
        self.command, self.given = command, given
        stdout, stderr, code = self._answer
        return subprocess.CompletedProcess(command, code, stdout, stderr)


def test_a_measurement_survives_json() -> None:
    made = measurement(replace(WORKLOAD, freeze=("*attention*", "*norm*"), checkpointing=1))
    assert from_json(Measurement, to_json(made)) == made


def test_derived_figures_of_a_measurement() -> None:
    made = measurement()
    assert made.context_bytes == 73
    assert made.step_time_s == pytest.approx(0.2)
    assert replace(made, process_bytes=None).context_bytes is None
    assert replace(made, step_times_s=(3.0,)).step_time_s is None


def test_the_process_gets_the_workload_and_its_last_line_is_the_answer() -> None:
    run = FakeRun("a library says hello\n" + to_json(measurement(), indent=None) + "\n")
    assert measure(WORKLOAD, num_steps=5, timeout_s=7.0, run=run) == measurement()
    assert run.command == [sys.executable, "-m", "vramfit.runtime.measurement", "5"]
    assert from_json(Workload, run.given["input"]) == WORKLOAD
    assert run.given["timeout"] == 7.0


def test_the_process_starts_with_the_allocator_of_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    run = FakeRun(to_json(measurement(), indent=None))
    measure(WORKLOAD, run=run)
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"} & set(run.given["env"])
    measure(replace(WORKLOAD, allocator="expandable"), run=run)
    assert run.given["env"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"


def test_an_error_of_the_process_is_told_with_its_hint() -> None:
    told = json.dumps({"error": "no CUDA device", "hint": "take another machine", "exit_code": 1})
    with pytest.raises(MeasurementError, match="no CUDA device") as caught:
        measure(WORKLOAD, run=FakeRun(told, code=1))
    assert caught.value.hint == "take another machine"


def test_a_wrong_workload_stays_a_wrong_workload() -> None:
    told = json.dumps({"error": "seq 600 is too long", "hint": None, "exit_code": 2})
    with pytest.raises(WorkloadError, match="seq 600"):
        measure(WORKLOAD, run=FakeRun(told, code=2))


def test_a_crash_shows_the_end_of_what_was_said() -> None:
    with pytest.raises(MeasurementError, match=r"code -11: .*the very last words") as caught:
        measure(WORKLOAD, run=FakeRun("half a li", stderr="noise\n" * 50 + "the very last words\n", code=-11))
    assert "\n" not in str(caught.value)


def test_a_run_without_end_is_ended() -> None:
    def run(command: list[str], **given: Any) -> "subprocess.CompletedProcess[str]":
        raise subprocess.TimeoutExpired(command, given["timeout"])

    with pytest.raises(MeasurementError, match="did not finish 3 steps in 5 s"):
        measure(WORKLOAD, timeout_s=5.0, run=run)


def test_without_a_gpu_one_line_says_so_and_one_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeasurementError, match="no CUDA device") as caught:
        run_workload(WORKLOAD)
    assert "vramfit estimate" in (caught.value.hint or "")


def test_an_allocator_that_was_not_set_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with pytest.raises(MeasurementError, match="allocator expandable"):
        run_workload(replace(WORKLOAD, allocator="expandable"))


def test_at_least_one_step_is_run() -> None:
    with pytest.raises(WorkloadError, match="0 steps"):
        run_workload(WORKLOAD, 0)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine whose GPU is its CPU, with an allocator that answers 10, 20, 30, …"""
    answers = [10, 20, 90, 60, 70, 80]
    monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(module, "_check_cuda", lambda workload: None)
    monkeypatch.setattr(module, "restart_peaks", lambda device: None)
    monkeypatch.setattr(module, "read_peaks", lambda device: peaks(answers.pop(0)))
    monkeypatch.setattr(
        module, "read_counts", lambda device: AllocatorCounts(reserved_bytes=1, num_retries=2, num_ooms=3)
    )
    monkeypatch.setattr(module, "present_gpu", lambda device: None)
    properties = SimpleNamespace(name="a CPU", major=9, minor=0, total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return answers


@pytest.mark.usefixtures("on_cpu")
def test_phases_are_written_down_one_after_the_other() -> None:
    made = run_workload(WORKLOAD, num_steps=3)
    assert {name: p.peak_requested_bytes for name, p in made.phases.items()} == {
        "load": 10,
        "inputs": 20,
        "first_step": 90,
        "steady_step": 70,
    }
    assert [p.peak_allocated_bytes for p in made.steps] == [180, 120, 140]
    assert [p.peak_reserved_bytes for p in made.steps] == [270, 270, 270], "the most since the start"
    assert len(made.step_times_s) == 3
    assert (made.num_retries, made.num_ooms, made.out_of_memory) == (2, 3, None)


@pytest.mark.usefixtures("on_cpu")
def test_running_out_of_memory_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def make_step(*_: Any) -> Any:
        def step() -> None:
            calls.append(1)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate 2.00 GiB.")

        return step

    monkeypatch.setattr(module, "make_step", make_step)
    made = run_workload(WORKLOAD)
    assert made.out_of_memory == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert list(made.phases) == ["load", "inputs", "first_step"]


@pytest.mark.usefixtures("on_cpu")
def test_any_other_failure_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: Any) -> Any:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(module, "prepare", prepare)
    with pytest.raises(RuntimeError, match="device-side assert"):
        run_workload(WORKLOAD)
