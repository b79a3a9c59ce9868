"""The probe, on a machine that is made up: a fake NVML, a fake torch, a fake /proc."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vramfit.devices.probe import PresentGPU, probe
from vramfit.units import GIB, MIB


class NVMLError(Exception):
    """What the fake raises, as pynvml does."""


class FakeNVML:
    """Two GPUs: an A10G with nothing on it, a T4 that a desktop and a trainer use."""

    NVMLError = NVMLError

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.broken = broken
        self.open = 0
        self.gpus = [
            {
                "name": "NVIDIA A10G",
                "uuid": "GPU-aaaa",
                "capability": (8, 6),
                "memory": SimpleNamespace(total=23028 * MIB, free=22731 * MIB),
                "compute": [],
                "graphics": [],
            },
            {
                "name": "Tesla T4",
                "uuid": "GPU-bbbb",
                "capability": (7, 5),
                "memory": SimpleNamespace(total=15360 * MIB, free=3 * GIB),
                "compute": [SimpleNamespace(pid=71, usedGpuMemory=9 * GIB)],
                "graphics": [
                    SimpleNamespace(pid=70, usedGpuMemory=200 * MIB),
                    SimpleNamespace(pid=71, usedGpuMemory=9 * GIB),
                    SimpleNamespace(pid=72, usedGpuMemory=None),
                ],
            },
        ]

    def _answer(self, function: str, value: Any) -> Any:
        if function in self.broken:
            raise NVMLError(function)
        return value

    def nvmlInit(self) -> None:  # noqa: N802
        self._answer("nvmlInit", None)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1
        self._answer("nvmlShutdown", None)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self._answer("nvmlSystemGetDriverVersion", "580.95.05")

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return self._answer("nvmlSystemGetCudaDriverVersion", 12080)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self._answer("nvmlDeviceGetCount", len(self.gpus))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        return self._answer(f"handle {index}", self.gpus[index])

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> str:  # noqa: N802
        return self._answer("nvmlDeviceGetName", handle["name"])

    def nvmlDeviceGetUUID(self, handle: dict[str, Any]) -> str:  # noqa: N802
        return self._answer("nvmlDeviceGetUUID", handle["uuid"])

    def nvmlDeviceGetCudaComputeCapability(self, handle: dict[str, Any]) -> tuple[int, int]:  # noqa: N802
        return self._answer("nvmlDeviceGetCudaComputeCapability", handle["capability"])

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> Any:  # noqa: N802
        return self._answer("nvmlDeviceGetMemoryInfo", handle["memory"])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: dict[str, Any]) -> list[Any]:  # noqa: N802
        return self._answer("nvmlDeviceGetComputeRunningProcesses", handle["compute"])

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: dict[str, Any]) -> list[Any]:  # noqa: N802
        return self._answer("nvmlDeviceGetGraphicsRunningProcesses", handle["graphics"])


class FakeTorch:
    """torch that sees the T4 alone, as device 0."""

    def __init__(self, uuids: tuple[str, ...] = ("bbbb",)) -> None:
        self.uuids = uuids
        self.cuda = self

    def device_count(self) -> int:
        return len(self.uuids)

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name="Tesla T4", uuid=self.uuids[index], major=7, minor=5, total_memory=14912 * MIB)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 10 * GIB, 14912 * MIB


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Names for processes 70 and 71; none for 72."""
    for pid, name in ((70, "Xorg"), (71, "python3")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
    return tmp_path


def test_two_gpus_are_described_as_the_driver_has_them(proc: Path) -> None:
    a10g, t4 = probe(nvml=FakeNVML(), proc=proc)
    assert (a10g.index, a10g.name, a10g.uuid, a10g.compute_capability) == (
        0,
        "NVIDIA A10G",
        "GPU-aaaa",
        (8, 6),
    )
    assert (a10g.total_bytes, a10g.free_bytes) == (23028 * MIB, 22731 * MIB)
    assert (t4.driver_version, t4.cuda_version) == ("580.95.05", "12.8")
    assert [gpu.catalogue_gpu.name for gpu in (a10g, t4) if gpu.catalogue_gpu] == ["a10g", "t4"]


def test_those_who_hold_memory_are_named_largest_first_and_once(proc: Path) -> None:
    a10g, t4 = probe(nvml=FakeNVML(), proc=proc)
    assert a10g.processes == ()
    assert [(p.pid, p.used_bytes, p.name) for p in t4.processes] == [
        (71, 9 * GIB, "python3"),
        (70, 200 * MIB, "Xorg"),
        (72, None, None),
    ]


def test_no_driver_means_no_gpus() -> None:
    assert probe(nvml=FakeNVML(broken=("nvmlInit",))) == ()


def test_no_nvml_library_means_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert probe() == ()


def test_a_machine_with_a_driver_and_no_gpu_has_none(proc: Path) -> None:
    nvml = FakeNVML()
    nvml.gpus = []
    assert probe(nvml=nvml, proc=proc) == ()


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlSystemGetDriverVersion", "driver_version"),
        ("nvmlSystemGetCudaDriverVersion", "cuda_version"),
        ("nvmlDeviceGetUUID", "uuid"),
        ("nvmlDeviceGetCudaComputeCapability", "compute_capability"),
    ],
)
def test_what_the_driver_does_not_tell_is_none_and_the_rest_stays(function: str, field: str, proc: Path) -> None:
    gpus = probe(nvml=FakeNVML(broken=(function,)), proc=proc)
    assert [gpu.name for gpu in gpus] == ["NVIDIA A10G", "Tesla T4"]
    assert [getattr(gpu, field) for gpu in gpus] == [None, None]


def test_processes_that_may_not_be_listed_are_left_out(proc: Path) -> None:
    broken = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
    assert [gpu.processes for gpu in probe(nvml=FakeNVML(broken=broken), proc=proc)] == [(), ()]


@pytest.mark.parametrize("function", ["nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCount"])
def test_gpus_that_do_not_answer_are_left_out(function: str, proc: Path) -> None:
    assert probe(nvml=FakeNVML(broken=(function,)), proc=proc) == ()


def test_one_gpu_that_fell_off_the_bus_does_not_hide_the_other(proc: Path) -> None:
    (t4,) = probe(nvml=FakeNVML(broken=("handle 0",)), proc=proc)
    assert (t4.index, t4.name) == (1, "Tesla T4")


@pytest.mark.parametrize("broken", [(), ("nvmlDeviceGetCount",), ("nvmlShutdown",)])
def test_nvml_is_closed_again_whatever_happens(broken: tuple[str, ...], proc: Path) -> None:
    nvml = FakeNVML(broken=broken)
    probe(nvml=nvml, proc=proc)
    assert nvml.open == 0


def test_torch_is_asked_only_on_request(proc: Path) -> None:
    gpus = probe(nvml=FakeNVML(), torch=FakeTorch(), proc=proc)
    assert [gpu.cuda_total_bytes for gpu in gpus] == [None, None]


def test_torch_adds_its_own_number_and_total_to_the_gpu_of_the_same_uuid(proc: Path) -> None:
    a10g, t4 = probe(nvml=FakeNVML(), torch=FakeTorch(), with_torch=True, proc=proc)
    assert (a10g.cuda_index, a10g.cuda_total_bytes) == (None, None)
    assert (t4.index, t4.cuda_index, t4.cuda_total_bytes) == (1, 0, 14912 * MIB)
    assert len(t4.processes) == 3


def test_a_gpu_that_only_torch_sees_is_described_by_torch() -> None:
    nvml = FakeNVML(broken=("nvmlInit",))
    (t4,) = probe(nvml=nvml, torch=FakeTorch(), with_torch=True)
    assert t4 == PresentGPU(
        index=0,
        name="Tesla T4",
        uuid="GPU-bbbb",
        compute_capability=(7, 5),
        total_bytes=14912 * MIB,
        free_bytes=10 * GIB,
        processes=(),
        driver_version=None,
        cuda_version=None,
        cuda_index=0,
        cuda_total_bytes=14912 * MIB,
        catalogue_gpu=t4.catalogue_gpu,
    )
    assert t4.catalogue_gpu is not None
    assert t4.catalogue_gpu.name == "t4"


def test_a_torch_that_cannot_start_cuda_takes_nothing_away(proc: Path) -> None:
    class BrokenTorch(FakeTorch):
        def get_device_properties(self, index: int) -> Any:
            raise RuntimeError("CUDA driver initialization failed")

    gpus = probe(nvml=FakeNVML(), torch=BrokenTorch(), with_torch=True, proc=proc)
    assert gpus == probe(nvml=FakeNVML(), proc=proc)
