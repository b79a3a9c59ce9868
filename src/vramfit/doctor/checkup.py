"""The checkup: every check of the environment, one function each, in the order a person would ask."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from packaging.requirements import Requirement

from vramfit.checkpoints.files import cached_snapshot
from vramfit.checkpoints.inspection import inspect_checkpoint, inspect_config
from vramfit.devices.probe import PresentGPU, probe
from vramfit.doctor.environment import MEANING, Environment, TorchBuild, gather
from vramfit.errors import CheckpointError
from vramfit.models import ResolvedModel, find_entry, resolve
from vramfit.models.hub import exported_file
from vramfit.models.resolve import parts_for
from vramfit.records.finding import Finding
from vramfit.tasks import DEFAULT
from vramfit.units import format_bytes


def check_model(
    model: str | Path, *, task: str = DEFAULT, scan: bool = False, num_labels: int | None = None
) -> list[Finding]:
    """All findings about a model, most severe first; loads no weights.

    Args:
        model: a folder, a catalogue name or a hub id.
        task: the head that is wanted.
        scan: read the data too, for NaN, infinite and all-zero tensors.
        num_labels: size of the head wanted; None keeps the configuration's.

    Raises:
        UnknownModel, WorkloadError: nothing goes by that name, or it has no head for the task.
    """
    free_bytes = next((gpu.free_bytes for gpu in probe()), None)
    try:
        resolved = resolve(model, task=task, num_labels=num_labels)
        folder = resolved.folder or cached_snapshot(_hub_id(resolved))
        if folder is None:
            no_weights = Finding.info(
                "weights.absent",
                f"no weights of {resolved.name} on this machine: only the configuration was checked",
                "predicting and planning need none",
                f"hf download {_hub_id(resolved)}, then run this again",
            )
            return [*inspect_config(resolved, gpu_free_bytes=free_bytes), no_weights]
        if (exported := exported_file(str(folder))) is not None:
            note = Finding.info(
                "weights.exported",
                f"{model} is an exported model (ONNX): only the configuration was checked",
                f"{exported.name} runs on the CPU as it is: evaluate, predict, encode, compare and serve take it",
                "to train it, or to load it elsewhere, give the folder that it was exported from",
            )
            return [*inspect_config(resolved, gpu_free_bytes=free_bytes), note]
        found = resolved
        if folder != resolved.folder:
            found = replace(resolved, folder=folder, parts=parts_for(task, folder))
        return list(inspect_checkpoint(found, scan=scan, gpu_free_bytes=free_bytes, num_labels=num_labels).findings)
    except CheckpointError as error:
        why = "nothing can be loaded from it"
        why += f"; the first fault is at {error.tensor[:80]}" if error.tensor else ""
        return [Finding.error("checkpoint.damaged", str(error), why, error.hint or "", fatal=True)]


def _hub_id(resolved: ResolvedModel) -> str:
    entry = find_entry(resolved.name)
    return entry.hub_id if entry is not None else resolved.name


OLDEST_PYTHON = (3, 11)
SHOWN = ("transformers", "tokenizers", "safetensors", "huggingface-hub")
MINIMUM_DRIVER = {11: 450, 12: 525, 13: 580}
"""Oldest driver branch that runs each CUDA major version (CUDA compatibility guide, minor-version table)."""


def check_python(env: Environment) -> Iterator[Finding]:
    """The interpreter."""
    found = ".".join(map(str, env.python))
    if env.python[:2] < OLDEST_PYTHON:
        yield Finding.error("python.version", f"Python {found} is older than 3.11", fix="use Python 3.11 or newer")
    else:
        yield Finding.ok("python.version", f"Python {found} on {env.system}")


def check_packages(env: Environment) -> Iterator[Finding]:
    """Every requirement of vramfit itself, and of transformers, against what is installed."""
    for name in SHOWN:
        if name in env.packages:
            yield Finding.ok(f"package.{name}", f"{name} {env.packages[name]}")
    for owner, texts in env.requirements.items():
        for requirement in map(Requirement, texts):
            plain = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            told = requirement.name == "torch" and env.torch is None  # by check_torch
            if plain and not told and not _is_met(env, requirement):
                found = env.packages.get(requirement.name)
                wanted = f"{requirement.name}{requirement.specifier}"
                yield Finding.error(
                    f"package.{requirement.name}",
                    f"{requirement.name} {found or 'is not installed'}; {owner} needs {wanted}",
                    "imports fail, or models load differently than they should",
                    f'pip install "{wanted}"',
                )


def check_extras(env: Environment) -> Iterator[Finding]:
    """Optional features: which are ready, and the command for those that are not."""
    missing: dict[str, list[str]] = {}
    for requirement in map(Requirement, env.requirements.get("vramfit", ())):
        extra = _extra(requirement)
        if extra and extra != "test" and requirement.name != "vramfit":
            missing.setdefault(extra, []).extend([] if _is_met(env, requirement) else [requirement.name])
    for extra, names in sorted(missing.items()):
        if names:
            what = f"extra {extra} is not installed (lacks {', '.join(names)})"
            yield Finding.info(f"extra.{extra}", what, fix=f'pip install "vramfit[{extra}]"')
        else:
            yield Finding.ok(f"extra.{extra}", f"extra {extra} is installed")


def _is_met(env: Environment, requirement: Requirement) -> bool:
    found = env.packages.get(requirement.name)
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def _extra(requirement: Requirement) -> str | None:
    """The extra a requirement belongs to; None for a plain one."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return None
    text = str(marker)
    return text.split("extra ==", 1)[1].strip().strip("\"'") if "extra ==" in text else None


def check_gpu(env: Environment) -> Iterator[Finding]:
    """Which GPUs are here, how much of them is free, and who else holds memory of them."""
    if not env.gpus:
        why = "predicting and planning need none; --device cpu and --device emulated train without"
        yield Finding.info("gpu.present", "no NVIDIA GPU here (no driver answers)", why)
    for gpu in env.gpus:
        yield Finding.ok(
            "gpu.present",
            f"GPU {gpu.index}: {gpu.name}, {format_bytes(gpu.free_bytes)} free of "
            f"{format_bytes(gpu.total_bytes)}, driver {gpu.driver_version}"
            + ("" if gpu.catalogue_gpu else ", not in the catalogue"),
        )
    for gpu in env.gpus:
        others = [p for p in gpu.processes if p.pid != env.process_id]
        if others:
            names = ", ".join(
                f"{p.name or 'process'} (pid {p.pid}"
                + (f", {format_bytes(p.used_bytes)})" if p.used_bytes is not None else ")")
                for p in others[:5]
            )
            yield Finding.warning(
                "gpu.shared",
                f"GPU {gpu.index} is also used by {names}",
                "what they hold is not available, and they may take more at any moment",
                f"stop them, or plan with --memory {format_bytes(gpu.free_bytes).replace(' ', '')} or less",
            )


def check_torch(env: Environment) -> Iterator[Finding]:
    """Whether torch is there, and whether its build can use the GPUs."""
    if env.torch is None:
        what = env.torch_problem or "torch is not installed"
        fix = "pip install --force-reinstall torch" if env.torch_problem else "pip install torch"
        yield Finding.error("torch.installed", what, fix=fix, fatal=True)
        return
    build = f"torch {env.torch.version}, " + (f"CUDA {env.torch.cuda}" if env.torch.cuda else "built without CUDA")
    if env.gpus and env.torch.cuda is None:
        yield Finding.error(
            "torch.build",
            f"{build}, but this machine has {env.gpus[0].name}",
            "the GPU cannot be used",
            f"change torch: install a build for CUDA {_usable_cuda(env.gpus[0])}",
        )
        return
    yield Finding.ok("torch.build", build)
    for gpu in env.gpus:
        yield from _check_driver(env.torch, gpu)
        yield from _check_capability(env.torch, gpu)


def _check_driver(torch: TorchBuild, gpu: PresentGPU) -> Iterator[Finding]:
    """The driver must run the CUDA that torch was built with; newer drivers run older CUDA."""
    assert torch.cuda is not None
    built, runs = (re.match(r"(\d+)\.\d+", text or "") for text in (torch.cuda, gpu.cuda_version))
    if runs is None or built is None or int(built[1]) <= int(runs[1]):
        return
    needed = MINIMUM_DRIVER.get(int(built[1]))
    newer = f"upgrade the driver to {needed} or newer" if needed else "upgrade the driver"
    yield Finding.error(
        "torch.driver",
        f"torch {torch.version} is built for CUDA {torch.cuda}, but driver {gpu.driver_version} "
        f"runs CUDA {gpu.cuda_version} at most",
        "torch.cuda.is_available() is False: everything would run on the CPU",
        f"change the driver: {newer}; where you cannot (a managed machine), change torch: "
        f"install a build for CUDA {_usable_cuda(gpu)}",
    )


def _check_capability(torch: TorchBuild, gpu: PresentGPU) -> Iterator[Finding]:
    """torch must hold code for this GPU: native of the same major version, or portable and not newer."""
    capability = gpu.compute_capability
    if not torch.architectures or capability is None or runs_on(torch.architectures, capability):
        return
    is_older = capability < min(_capabilities(torch.architectures, "sm"), default=(0, 0))
    older = "install an older release that still supports this GPU, or use a newer GPU"
    yield Finding.error(
        "torch.capability",
        f"torch {torch.version} has no code for {gpu.name} (sm_{capability[0]}{capability[1]}); "
        f"it was built for {' '.join(torch.architectures)}",
        "the first kernel would fail with 'no kernel image is available'",
        f"change torch: {older if is_older else 'install a newer release, built for this GPU'}",
    )


def runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code compiled for `architectures` runs on a GPU of this compute capability."""
    native = any(
        built[0] == capability[0] and built[1] <= capability[1] for built in _capabilities(architectures, "sm")
    )
    return native or any(built <= capability for built in _capabilities(architectures, "compute"))


def _capabilities(architectures: tuple[str, ...], kind: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(rf"{kind}_(\d+)(\d)[a-z]?", a) for a in architectures]
    return [(int(m[1]), int(m[2])) for m in found if m]


def _usable_cuda(gpu: PresentGPU) -> str:
    """The major version of the CUDA builds that the driver runs: within it, minor versions do not matter."""
    return (gpu.cuda_version or "12").partition(".")[0]


def check_variables(env: Environment) -> Iterator[Finding]:
    """One finding for each variable that is set."""
    for name, value in env.variables.items():
        severity, why, fix = MEANING[name]
        yield Finding(check=f"variable.{name}", severity=severity, what=f"{name}={value[:120]}", why=why, fix=fix)
    confs = [env.variables.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    if None not in confs and confs[0] != confs[1]:
        yield Finding.warning(
            "variable.PYTORCH_ALLOC_CONF",
            "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF are both set and differ",
            "newer torch releases read the first, older ones only the second",
            "keep one, or set both alike",
        )


CHECKS = (check_python, check_torch, check_packages, check_gpu, check_variables, check_extras)


def check_environment(env: Environment | None = None) -> list[Finding]:
    """All findings about an environment; about this one when none is given."""
    env = env or gather()
    return [finding for check in CHECKS for finding in check(env)]
