"""NVML's view of a process, with a driver that is made up."""

import json
import subprocess
import sys

import pytest
from tests.waiting import running

from vramfit.cli import watch as nvml_view
from vramfit.devices.probe import GPUProcess, PresentGPU
from vramfit.errors import VramfitError
from vramfit.records.codec import from_data
from vramfit.records.watch import WatchRecord

GIB = 2**30


def gpu_with(pid: int) -> PresentGPU:
    return PresentGPU(
        index=0,
        name="a GPU",
        uuid="GPU-1",
        compute_capability=(9, 0),
        total_bytes=80 * GIB,
        free_bytes=70 * GIB,
        processes=(GPUProcess(pid=1, used_bytes=GIB, name="x"), GPUProcess(pid=pid, used_bytes=3 * GIB, name="y")),
        driver_version=None,
        cuda_version=None,
    )


def test_a_process_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    looks: list[int] = []

    def probe() -> tuple[PresentGPU, ...]:
        looks.append(1)
        if len(looks) == 4:
            child.kill()
            child.wait()
        return (gpu_with(child.pid),)

    monkeypatch.setattr(nvml_view, "_probe", probe)
    with running([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert nvml_view.watch_process(child.pid, interval_s=0.05, live=False, json=True) == 0
    out, err = capsys.readouterr()
    record = from_data(WatchRecord, json.loads(out))
    assert record.peak_process_bytes == 3 * GIB
    assert len(record.samples) == 3
    assert "NVML's view only" in err


def test_a_command_that_is_no_python_is_followed_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvml_view, "_probe", lambda: (gpu_with(1),))
    assert nvml_view.watch_command(["bash", "-c", "exit 4"], interval_s=0.05, json=False) == 4
    assert "no GPU memory that the driver would tell of" in capfd.readouterr().err


def test_no_driver_is_an_error_with_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_view, "_probe", lambda: ())
    with pytest.raises(VramfitError, match="no NVIDIA driver") as caught:
        nvml_view.watch_process(1, interval_s=1, live=False, json=False)
    assert "watch SCRIPT.py" in (caught.value.hint or "")
