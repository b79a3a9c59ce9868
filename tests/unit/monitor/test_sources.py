from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vramfit.devices.probe import GPUProcess, PresentGPU
from vramfit.monitor.sources import process_bytes, read_counts, read_peaks

DEVICE = torch.device("cuda", 0)


def gpu(*processes: tuple[int, int | None]) -> PresentGPU:
    return PresentGPU(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-1",
        compute_capability=(9, 0),
        total_bytes=100,
        free_bytes=50,
        processes=tuple(GPUProcess(pid=pid, used_bytes=used, name=None) for pid, used in processes),
        driver_version="580.1",
        cuda_version="13.0",
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The allocator of a GPU that is not there, and the order it is asked in."""
    seen: list[str] = []
    stats: dict[str, Any] = {
        "requested_bytes.all.peak": 1,
        "allocated_bytes.all.peak": 512,
        "reserved_bytes.all.peak": 2**21,
        "reserved_bytes.all.current": 2**20,
        "num_alloc_retries": 3,
        "num_ooms": 4,
    }
    cuda = SimpleNamespace(
        synchronize=lambda device: seen.append("synchronize"),
        memory_stats=lambda device: seen.append("memory_stats") or stats,
    )
    monkeypatch.setattr("vramfit.monitor.sources.torch", SimpleNamespace(cuda=cuda))
    return seen


def test_peaks_are_read_when_the_queued_work_is_done(calls: list[str]) -> None:
    peaks = read_peaks(DEVICE)
    assert (peaks.peak_requested_bytes, peaks.peak_allocated_bytes, peaks.peak_reserved_bytes) == (1, 512, 2**21)
    assert calls == ["synchronize", "memory_stats"]


def test_counts_are_the_allocators_own(calls: list[str]) -> None:
    counts = read_counts(DEVICE)
    assert (counts.reserved_bytes, counts.num_retries, counts.num_ooms) == (2**20, 3, 4)


def test_the_driver_charges_a_process_by_its_number() -> None:
    assert process_bytes(gpu((7, 70), (8, 80)), pid=8) == 80


def test_a_single_process_under_a_foreign_number_is_this_one() -> None:
    assert process_bytes(gpu((4711, 70)), pid=8) == 70


def test_nothing_is_said_where_the_driver_says_nothing() -> None:
    assert process_bytes(None) is None
    assert process_bytes(gpu(), pid=8) is None
    assert process_bytes(gpu((7, 70), (9, 90)), pid=8) is None
    assert process_bytes(gpu((8, None)), pid=8) is None
