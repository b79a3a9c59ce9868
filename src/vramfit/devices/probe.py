"""The GPUs present, asked of the driver (NVML) and, on request, of torch; an absent driver is no GPUs."""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from vramfit.devices.catalogue import GPU, match_gpu

T = TypeVar("T")
_DRIVERS = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUProcess:
    """One process that holds memory on a GPU."""

    pid: int
    """As the driver numbers it; inside a container that may be the host's number."""
    used_bytes: int | None
    """What it holds; None where the driver does not say (Windows)."""
    name: str | None
    """Its command; None where it cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PresentGPU:
    """One GPU of this machine, as it was when asked."""

    index: int
    """The driver's number, as in nvidia-smi; torch may number otherwise (CUDA_VISIBLE_DEVICES)."""
    name: str
    """As the driver reports it."""
    uuid: str | None
    """`GPU-…`: the name that stays."""
    compute_capability: tuple[int, int] | None
    """Architecture."""
    total_bytes: int
    """As NVML counts: CUDA has a few hundred MiB less."""
    free_bytes: int
    """Held by nobody when asked."""
    processes: tuple[GPUProcess, ...]
    """Who holds the rest, largest first; empty where the driver does not say."""
    driver_version: str | None
    """Such as `580.95.05`."""
    cuda_version: str | None
    """Highest CUDA version that the driver supports, such as `13.0`."""
    cuda_index: int | None = None
    """torch's number for it; None if torch was not asked or does not see it."""
    cuda_total_bytes: int | None = None
    """What CUDA has in all: `total_memory` of torch; None if torch was not asked or does not see it."""
    catalogue_gpu: GPU | None = None
    """The catalogue's entry for it."""


def has_driver() -> bool:
    """Whether the library of CUDA's driver can be loaded; without it no torch finds a GPU. CUDA is not started."""
    try:
        return sys.platform in _DRIVERS and ctypes.CDLL(_DRIVERS[sys.platform]) is not None
    except OSError:
        return False


def probe(
    *, with_torch: bool = False, nvml: Any = None, torch: Any = None, proc: Path = Path("/proc")
) -> tuple[PresentGPU, ...]:
    """The GPUs of this machine; none, and no exception, where there is no driver or no NVML.

    Args:
        with_torch: ask torch too, for `cuda_index` and `cuda_total_bytes`. This imports torch and
            initialises CUDA in this process.
        nvml: the NVML binding; `pynvml` if not given.
        torch: the torch module; imported if not given and `with_torch`.
        proc: where process names are read.
    """
    nvml = nvml or _import_or_none("pynvml")
    present = _ask_nvml(nvml, proc) if nvml is not None else ()
    if with_torch:
        torch = torch or _import_or_none("torch")
        if torch is not None:
            present = _ask_torch(torch, present)
    return present


def _import_or_none(name: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, OSError):  # OSError: a shared library of it does not load
        return None


def _ask_nvml(nvml: Any, proc: Path) -> tuple[PresentGPU, ...]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        driver = _or_none(nvml, nvml.nvmlSystemGetDriverVersion)
        cuda = _or_none(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        count = _or_none(nvml, nvml.nvmlDeviceGetCount) or 0
        found = (_describe(nvml, index, driver, cuda, proc) for index in range(count))
        return tuple(gpu for gpu in found if gpu is not None)
    finally:
        _or_none(nvml, nvml.nvmlShutdown)


def _describe(nvml: Any, index: int, driver: str | None, cuda: int | None, proc: Path) -> PresentGPU | None:
    """One GPU; None for one that fell off the bus or that this user may not see."""
    handle = _or_none(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return None
    name = _or_none(nvml, nvml.nvmlDeviceGetName, handle)
    memory = _or_none(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if name is None or memory is None:
        return None
    capability = _or_none(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return PresentGPU(
        index=index,
        name=name,
        uuid=_or_none(nvml, nvml.nvmlDeviceGetUUID, handle),
        compute_capability=(capability[0], capability[1]) if capability else None,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        processes=_processes(nvml, handle, proc),
        driver_version=driver,
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        catalogue_gpu=match_gpu(name, int(memory.total)),
    )


def _processes(nvml: Any, handle: Any, proc: Path) -> tuple[GPUProcess, ...]:
    used: dict[int, int | None] = {}
    for query in (nvml.nvmlDeviceGetGraphicsRunningProcesses, nvml.nvmlDeviceGetComputeRunningProcesses):
        # A process that draws and computes is in both lists, with one and the same figure.
        used |= {entry.pid: entry.usedGpuMemory for entry in _or_none(nvml, query, handle) or ()}
    found = [GPUProcess(pid=pid, used_bytes=size, name=_process_name(proc, pid)) for pid, size in used.items()]
    return tuple(sorted(found, key=lambda process: (-(process.used_bytes or 0), process.pid)))


def _process_name(proc: Path, pid: int) -> str | None:
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip() or None
    except OSError:
        return None


def _or_none(nvml: Any, query: Callable[..., T], *arguments: Any) -> T | None:
    """NVML's answer; None where this GPU, driver or user does not get one."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


def _ask_torch(torch: Any, present: tuple[PresentGPU, ...]) -> tuple[PresentGPU, ...]:
    """The same GPUs with torch's number and total, and those that only torch sees."""
    gpus: dict[str | int, PresentGPU] = {gpu.uuid or gpu.index: gpu for gpu in present}
    try:
        for cuda_index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(cuda_index)
            uuid = f"GPU-{properties.uuid}"
            known = gpus.get(uuid) or _from_torch(torch, cuda_index, properties, uuid)
            gpus[uuid] = replace(known, cuda_index=cuda_index, cuda_total_bytes=properties.total_memory)
    except RuntimeError:  # CUDA does not start: what NVML said stands
        return present
    return tuple(gpus.values())


def _from_torch(torch: Any, cuda_index: int, properties: Any, uuid: str) -> PresentGPU:
    free_bytes, total_bytes = torch.cuda.mem_get_info(cuda_index)
    return PresentGPU(
        index=cuda_index,
        name=properties.name,
        uuid=uuid,
        compute_capability=(properties.major, properties.minor),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        processes=(),
        driver_version=None,
        cuda_version=None,
        catalogue_gpu=match_gpu(properties.name, total_bytes),
    )
