"""`Environment`: what the checks look at, gathered once; a plain record, so that any machine can be told of."""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version

from vramfit.devices.probe import PresentGPU, probe

WATCHED_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that change what is allocated, where, or what can be fetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """What the installed torch was built for."""

    version: str
    cuda: str | None
    """CUDA version of the build, such as "13.0"; None for a build without CUDA."""
    architectures: tuple[str, ...] = ()
    """Compiled targets: "sm_90" native code, "compute_90" portable code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """A machine and its Python, as far as vramfit depends on them."""

    python: tuple[int, int, int]
    system: str
    torch: TorchBuild | None
    torch_problem: str = ""
    """Why torch could not be imported, when it is installed but broken."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Installed version of everything vramfit or transformers asks for."""
    requirements: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What `vramfit` and `transformers` ask for, as written in their metadata."""
    gpus: tuple[PresentGPU, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    process_id: int = 0


def gather() -> Environment:
    """The environment of this process; imports torch, never fails."""
    torch, problem = _torch_build()
    requirements = {name: _requirements(name) for name in ("vramfit", "transformers")}
    names = {_name(text) for texts in requirements.values() for text in texts} | {"torch", "transformers"}
    packages = {name: found for name in sorted(names) if (found := _version(name))}
    return Environment(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.machine()}",
        torch=torch,
        torch_problem=problem,
        packages=packages,
        requirements=requirements,
        gpus=probe(),
        variables={name: os.environ[name] for name in WATCHED_VARIABLES if name in os.environ},
        process_id=os.getpid(),
    )


def _torch_build() -> tuple[TorchBuild | None, str]:
    try:
        import torch
    except ImportError as error:
        installed = _version("torch")
        return None, f"torch {installed} does not import: {error}" if installed else ""
    cuda = torch.version.cuda
    flags = torch._C._cuda_getArchFlags() if cuda else None
    return TorchBuild(version=torch.__version__, cuda=cuda, architectures=tuple((flags or "").split())), ""


def _requirements(name: str) -> tuple[str, ...]:
    try:
        return tuple(requires(name) or ())
    except PackageNotFoundError:
        return ()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _name(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name
