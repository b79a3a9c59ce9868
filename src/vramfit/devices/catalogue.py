"""The GPU catalogue and the cloud instances, read from the JSON files in this folder, and their look-up.

Drivers differ in how much memory they leave to CUDA, and newer ones leave less: `total_memory_bytes` is
the lowest figure seen on Linux (Windows shows up to 3 % more). Every figure has its source in the file.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

from vramfit.errors import UnknownGPU, nearest_names
from vramfit.records.codec import from_data
from vramfit.units import GIB, MIB

DEFAULT_ARCHITECTURE: tuple[int, int] = (8, 0)
"""Compute capability assumed when only an amount of memory is given."""

# Threads a multiprocessor holds where it is not 2048: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
_MAX_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}

# What a name may be written with or without: "NVIDIA GeForce RTX 4090", "rtx-4090", "RTX4090".
_NOISE = re.compile(r"nvidia|geforce|tesla|[\s_-]+")

# A GPU present is one of the catalogue when its memory is this near: NVML counts what the driver keeps,
# and ECC takes up to 6.25 %.
_SAME_MEMORY = (0.93, 1.10)

ContextBasis = Literal["measured", "reported", "bounded"]
CONTEXT_BOUND_BYTES = 550 * MIB
"""What CUDA's context takes at most where no figure is known. Above what CUDA itself said of other GPUs: 135 MiB on a
T4 after the first products and convolutions (torch-preflight 0.5.0, torch 2.10 and 2.11), 450 MiB on an RTX 4090."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """One GPU model; a board with several GPUs (K80, M60, A16) is one entry, of one of them."""

    name: str
    """Its name in vramfit, such as `rtx-4090`."""
    aliases: tuple[str, ...]
    """Other names for it; no two GPUs share one."""
    title: str
    """Its name to show."""
    reported_names: tuple[str, ...]
    """What the driver calls it; GPUs that differ in memory alone may share one."""
    kind: Literal["data-center", "workstation", "consumer"]
    """Who it is sold to."""
    compute_capability: tuple[int, int]
    """Architecture, as `torch.cuda.get_device_capability` gives it."""
    num_multiprocessors: int
    """Streaming multiprocessors, as CUDA counts them."""
    total_memory_bytes: int
    """`torch.cuda.get_device_properties(0).total_memory`: what CUDA has, less than what is sold."""
    memory_basis: Literal["reported", "nominal"]
    """`reported`: seen as CUDA reports it; `nominal`: worked out from a figure that includes the driver's
    share, or from a GPU of the same size; the source says how."""
    nominal_memory_bytes: int
    """What is sold, in GiB as the box says."""
    context_bytes: int | None = None
    """What CUDA's context and the kernels it loads take of a process; None where nobody published it."""
    context_basis: ContextBasis | None = None
    """`measured` by vramfit; `reported` by others; `bounded`: what others saw includes more than the context."""
    memory_bandwidth_bytes_per_s: int | None
    """Peak rate of the GPU's memory."""
    peak_fp32: float | None
    """FLOP/s outside tensor cores; all rates are dense and at the boost clock."""
    peak_tf32: float | None
    """FLOP/s of tensor cores on TF32; None where there is none or no source."""
    peak_fp16: float | None
    """FLOP/s on FP16, with FP32 accumulation where tensor cores do it."""
    peak_bf16: float | None
    """FLOP/s of tensor cores on BF16."""
    peak_fp8: float | None
    """FLOP/s of tensor cores on FP8."""
    sources: Mapping[str, str] = field(hash=False, repr=False)
    """Figure, or figures with commas between, → where it comes from."""

    @property
    def sm(self) -> str:
        """The architecture as compilers write it: `sm_90`."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"

    @property
    def max_threads_per_multiprocessor(self) -> int:
        """Threads that one multiprocessor holds at a time."""
        return _MAX_THREADS.get(self.compute_capability, 2048)

    @property
    def supports_bf16(self) -> bool:
        """BF16 arithmetic in hardware."""
        return self.compute_capability >= (8, 0)

    def source_of(self, figure: str) -> str | None:
        """Where a figure comes from; None for one that is not known."""
        for figures, source in self.sources.items():
            if figure in figures.split(", "):
                return source
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One cloud machine with GPUs."""

    name: str
    """As its provider writes it: `ml.g5.xlarge`."""
    provider: Literal["sagemaker", "azure", "google", "colab"]
    """Whose it is."""
    gpu: str
    """Catalogue name of its GPUs."""
    num_gpus: int
    """As CUDA counts them: a K80 board is two."""
    host_memory_bytes: int | None
    """Memory of the machine itself; None where it is not known."""
    source: str
    """Where this comes from."""


@cache
def all_gpus() -> tuple[GPU, ...]:
    """Every GPU of the catalogue, data-center first, older first."""
    return _read("gpus", GPU)


@cache
def all_instances() -> tuple[Instance, ...]:
    """Every cloud instance known."""
    return _read("instances", Instance)


def find_gpu(name: str) -> GPU:
    """The GPU of that name.

    Args:
        name: a catalogue name, an alias, a title, what the driver calls the GPU, or an instance, whose
            GPU it gives. Case, spaces, `-`, `_`, "NVIDIA", "GeForce" and "Tesla" do not matter. A name
            that is sold with two amounts of memory ("a100") is the smaller one: what fits there fits both.

    Raises:
        UnknownGPU: no such GPU; names the three nearest.

    >>> find_gpu("NVIDIA GeForce RTX 4090").name, find_gpu("a100").name, find_gpu("ml.g5.xlarge").name
    ('rtx-4090', 'a100-40gb', 'a10g')
    """
    key = _key(name)
    gpu = _gpu_index().get(key)
    if gpu is not None:
        return gpu
    instance = _instance_index().get(key)
    if instance is not None:
        return find_gpu(instance.gpu)
    if "." in name or "standard" in name.lower():
        raise _unknown("GPU", name, _nearest(name, {i.name: i for i in all_instances()}))
    raise _unknown("GPU", name, _nearest(name, _spellings()))


def find_instance(name: str) -> Instance:
    """The cloud instance of that name; `ml.` and `Standard_` may be left out.

    Raises:
        UnknownGPU: no such instance; names the three nearest.

    >>> find_instance("ml.g5.12xlarge").num_gpus
    4
    """
    instance = _instance_index().get(_key(name))
    if instance is None:
        raise _unknown("instance", name, _nearest(name, {i.name: i for i in all_instances()}))
    return instance


def context_of(gpu: GPU | None) -> tuple[int, ContextBasis]:
    """What CUDA's context takes on a GPU, and how that is known.

    A GPU without a figure of its own has an upper bound: `CONTEXT_BOUND_BYTES`, or the highest figure of a GPU of the
    same architecture where that is more.

    >>> context_of(find_gpu("h200")) == (758 * MIB, "measured"), context_of(None) == (CONTEXT_BOUND_BYTES, "bounded")
    (True, True)
    """
    if gpu is None:
        return CONTEXT_BOUND_BYTES, "bounded"
    if gpu.context_bytes is not None:
        return gpu.context_bytes, gpu.context_basis or "bounded"
    alike = [g.context_bytes or 0 for g in all_gpus() if g.compute_capability == gpu.compute_capability]
    return max(CONTEXT_BOUND_BYTES, *alike), "bounded"


def match_gpu(reported_name: str, total_bytes: int) -> GPU | None:
    """The catalogue's GPU for one that is present, by the driver's name for it and its memory; or None."""
    key = _key(reported_name)
    low, high = _SAME_MEMORY
    alike = [
        gpu
        for gpu in all_gpus()
        if key in map(_key, gpu.reported_names) and low <= total_bytes / gpu.total_memory_bytes <= high
    ]
    return min(alike, key=lambda gpu: abs(total_bytes - gpu.total_memory_bytes), default=None)


def _read(what: str, cls: type[T]) -> tuple[T, ...]:
    data = json.loads(Path(__file__).with_name(f"{what}.json").read_text(encoding="utf-8"))
    return tuple(from_data(cls, entry) for entry in data[what])


def _key(name: str) -> str:
    return _NOISE.sub("", name.lower())


@cache
def _gpu_index() -> Mapping[str, GPU]:
    index: dict[str, GPU] = {}
    for gpu in sorted(all_gpus(), key=lambda gpu: gpu.total_memory_bytes, reverse=True):
        index.update({_key(name): gpu for name in gpu.reported_names})
    for gpu in all_gpus():
        sized = f"{gpu.name}-{gpu.nominal_memory_bytes // GIB}gb"
        index.update({_key(name): gpu for name in (sized, gpu.title, *gpu.aliases)})
    return index | {_key(gpu.name): gpu for gpu in all_gpus()}


@cache
def _instance_index() -> Mapping[str, Instance]:
    short = {_key(re.sub(r"^(ml\.|Standard_)", "", i.name)): i for i in all_instances()}
    return short | {_key(i.name): i for i in all_instances()}


def _spellings() -> Mapping[str, GPU]:
    """Names to suggest: an alias such as `h100` is nearer to what people type than `h100-sxm`."""
    names = {name: gpu for gpu in all_gpus() for name in (gpu.name, *gpu.aliases)}
    return {name: gpu for name, gpu in names.items() if not name[0].isdigit()}


def _nearest(name: str, known: Mapping[str, object]) -> tuple[str, ...]:
    """The three known names most like `name`, no two of them for one thing."""
    found: dict[int, str] = {}
    for candidate in nearest_names(name, known, len(known)):
        found.setdefault(id(known[candidate]), candidate)
    return tuple(found.values())[:3]


def _unknown(what: str, name: str, nearest: tuple[str, ...]) -> UnknownGPU:
    shown = name if len(name) <= 60 else f"{name[:60]}…"
    return UnknownGPU(
        f"no {what} {shown!r}; the nearest are {', '.join(nearest)}",
        nearest=nearest,
        hint=f"vramfit gpus lists all {len(all_gpus())}",
    )
