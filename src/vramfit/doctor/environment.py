"""`Environment`: what the checks look at, gathered once; and `write_lock`: its exact versions, as a file."""

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distributions, requires, version
from pathlib import Path

from vramfit.devices.probe import PresentGPU, probe
from vramfit.errors import VramfitError
from vramfit.records.codec import replace_file
from vramfit.records.finding import Severity

HEADER = "# Written by `vramfit doctor --lock`"
CONDA = """{header}. Recreate with: conda env create -f FILE
name: {name}
channels:
  - conda-forge
dependencies:
  - python={python}
  - pip
  - pip:
"""

MEANING: dict[str, tuple[Severity, str, str]] = {
    "CUBLAS_WORKSPACE_CONFIG": (
        "info",
        "changes the workspace cuBLAS keeps on each thread (32 MiB on Hopper, 8.1 MiB elsewhere)",
        "unset it unless you need deterministic products",
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("info", "changes how many streams run side by side, not memory", ""),
    "CUDA_LAUNCH_BLOCKING": (
        "warning",
        "makes every kernel wait for the one before: training is much slower",
        "unset it when you are not debugging",
    ),
    "CUDA_MODULE_LOADING": ("info", "EAGER loads all kernels at start: hundreds of MiB more context", "unset it"),
    "CUDA_VISIBLE_DEVICES": ("info", "hides GPUs or renumbers them", ""),
    "HF_HUB_OFFLINE": ("info", "models are found in the catalogue, in folders and in the cache only", ""),
    "NVIDIA_TF32_OVERRIDE": ("warning", "overrides the precision of products that a program asked for", "unset it"),
    "PYTORCH_ALLOC_CONF": ("info", "changes how the caching allocator rounds, splits and grows", ""),
    "PYTORCH_CUDA_ALLOC_CONF": ("info", "changes how the caching allocator rounds, splits and grows", ""),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "error",
        "turns the caching allocator off: predictions do not hold, and every allocation waits",
        "unset it",
    ),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (
        "warning",
        "turns TF32 on for fp32 products",
        "unset it, or say precision tf32",
    ),
}
"""Environment variables that change what is allocated, where, or what can be fetched: how grave, why, what to do."""


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
        variables={name: os.environ[name] for name in MEANING if name in os.environ},
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


def write_lock(path: Path, found: Iterable[Distribution] | None = None) -> int:
    """Write the lock, as a conda environment for `.yml` or `.yaml`, else as requirements; gives the number of packages.

    It is what `pip freeze` gives, without files and folders of this machine, and without a need for pip.

    Args:
        found: distributions to lock; None takes all that are installed. The first of a name on the path wins, as in
            Python.

    Raises:
        VramfitError: the file exists and is not a lock, or cannot be written.
    """
    from packaging.utils import canonicalize_name

    lines: dict[str, str] = {}
    for distribution in distributions() if found is None else found:
        if name := distribution.metadata["Name"]:
            lines.setdefault(canonicalize_name(name), requirement_of(distribution))
    python, made = platform.python_version(), [lines[name] for name in sorted(lines)]
    if path.suffix.lower() in (".yml", ".yaml"):
        text = CONDA.format(header=HEADER, name=path.stem, python=python)
        made = [line if line.startswith("#") else f"- {line}" for line in made if not line.startswith("pip==")]
        text += "".join(f"      {line}\n" for line in made)
    else:
        text = f"{HEADER}: Python {python}. Recreate with: pip install -r FILE\n" + "".join(f"{s}\n" for s in made)
    _refuse_foreign(path)
    replace_file(path, text.encode())
    return len(lines)


def requirement_of(distribution: Distribution) -> str:
    """The line that installs a distribution again; a comment where no other machine could install it."""
    name, version = distribution.metadata["Name"], distribution.version
    try:  # PEP 610: where it came from when it came from no index
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except json.JSONDecodeError:
        origin = {}
    if "vcs_info" in origin:
        return f"{name} @ {origin['vcs_info']['vcs']}+{origin['url']}@{origin['vcs_info']['commit_id']}"
    if "dir_info" in origin:
        return f"# {name}=={version}: installed here from a local folder"
    if origin and not origin["url"].startswith("file:"):
        return f"{name} @ {origin['url']}"
    public, _, local = version.partition("+")  # a wheel from a local folder is what the index would have given
    return f"{name}=={public}" + (f"  # here: {version}" if local else "")


def _refuse_foreign(path: Path) -> None:
    """Only a lock is overwritten: nobody loses a file to a slip of the keyboard."""
    if path.is_dir():
        raise VramfitError(f"{path} is a folder", hint=f"name a file, such as {path / 'requirements.lock.txt'}")
    try:
        existing = path.read_text(errors="replace") if path.exists() else HEADER
    except OSError as error:
        raise VramfitError(f"cannot read {path}: {error.strerror}") from None
    if not existing.startswith(HEADER):
        raise VramfitError(
            f"{path} exists and was not written by vramfit doctor --lock",
            hint="choose another name, or remove it first",
        )
