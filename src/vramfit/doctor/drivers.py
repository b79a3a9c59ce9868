"""torch against the driver and the GPU: which of them to change when they do not match."""

import re

from vramfit.devices.probe import PresentGPU
from vramfit.doctor.environment import Environment, TorchBuild
from vramfit.records.finding import Finding
from vramfit.units import format_bytes

MINIMUM_DRIVER = {11: 450, 12: 525, 13: 580}
"""Oldest driver branch that runs each CUDA major version (CUDA compatibility guide, minor-version table)."""


def check_gpu(env: Environment) -> list[Finding]:
    """Which GPUs are here and how much of them is free."""
    if not env.gpus:
        return [
            Finding(
                check="gpu.present",
                severity="info",
                what="no NVIDIA GPU here (no driver answers)",
                why="predicting and planning need none; --device cpu and --device emulated train without",
            )
        ]
    return [
        Finding(
            check="gpu.present",
            severity="ok",
            what=f"GPU {gpu.index}: {gpu.name}, {format_bytes(gpu.free_bytes)} free of "
            f"{format_bytes(gpu.total_bytes)}, driver {gpu.driver_version}"
            + ("" if gpu.catalogue_gpu else ", not in the catalogue"),
        )
        for gpu in env.gpus
    ]


def check_others(env: Environment) -> list[Finding]:
    """Who else holds memory of the GPUs."""
    findings = []
    for gpu in env.gpus:
        others = [p for p in gpu.processes if p.pid != env.process_id]
        if others:
            names = ", ".join(
                f"{p.name or 'process'} (pid {p.pid}"
                + (f", {format_bytes(p.used_bytes)})" if p.used_bytes is not None else ")")
                for p in others[:5]
            )
            findings.append(
                Finding(
                    check="gpu.shared",
                    severity="warning",
                    what=f"GPU {gpu.index} is also used by {names}",
                    why="what they hold is not available, and they may take more at any moment",
                    fix=f"stop them, or plan with --memory {format_bytes(gpu.free_bytes).replace(' ', '')} or less",
                )
            )
    return findings


def check_torch(env: Environment) -> list[Finding]:
    """Whether torch is there, and whether its build can use the GPUs."""
    if env.torch is None:
        return [
            Finding(
                check="torch.installed",
                severity="error",
                what=env.torch_problem or "torch is not installed",
                fix="pip install --force-reinstall torch" if env.torch_problem else "pip install torch",
                fatal=True,
            )
        ]
    build = f"torch {env.torch.version}, " + (f"CUDA {env.torch.cuda}" if env.torch.cuda else "built without CUDA")
    if env.gpus and env.torch.cuda is None:
        return [
            Finding(
                check="torch.build",
                severity="error",
                what=f"{build}, but this machine has {env.gpus[0].name}",
                why="the GPU cannot be used",
                fix=f"change torch: install a build for CUDA {_usable_cuda(env.gpus[0])}",
            )
        ]
    findings = [Finding(check="torch.build", severity="ok", what=build)]
    for gpu in env.gpus:
        findings += _check_driver(env.torch, gpu) + _check_capability(env.torch, gpu)
    return findings


def _check_driver(torch: TorchBuild, gpu: PresentGPU) -> list[Finding]:
    """The driver must run the CUDA that torch was built with; newer drivers run older CUDA."""
    assert torch.cuda is not None
    built, runs = _pair(torch.cuda), _pair(gpu.cuda_version)
    if runs is None or built is None or built[0] <= runs[0]:
        return []
    needed = MINIMUM_DRIVER.get(built[0])
    newer = f"upgrade the driver to {needed} or newer" if needed else "upgrade the driver"
    return [
        Finding(
            check="torch.driver",
            severity="error",
            what=f"torch {torch.version} is built for CUDA {torch.cuda}, but driver {gpu.driver_version} "
            f"runs CUDA {gpu.cuda_version} at most",
            why="torch.cuda.is_available() is False: everything would run on the CPU",
            fix=f"change the driver: {newer}; where you cannot (a managed machine), change torch: "
            f"install a build for CUDA {_usable_cuda(gpu)}",
        )
    ]


def _check_capability(torch: TorchBuild, gpu: PresentGPU) -> list[Finding]:
    """torch must hold code for this GPU: native of the same major version, or portable and not newer."""
    capability = gpu.compute_capability
    if not torch.architectures or capability is None or runs_on(torch.architectures, capability):
        return []
    major, minor = capability
    oldest = min(_capabilities(torch.architectures, "sm"), default=(0, 0))
    older = (major, minor) < oldest
    return [
        Finding(
            check="torch.capability",
            severity="error",
            what=f"torch {torch.version} has no code for {gpu.name} (sm_{major}{minor}); "
            f"it was built for {' '.join(torch.architectures)}",
            why="the first kernel would fail with 'no kernel image is available'",
            fix="change torch: "
            + (
                "install an older release that still supports this GPU, or use a newer GPU"
                if older
                else "install a newer release, built for this GPU"
            ),
        )
    ]


def runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code compiled for `architectures` runs on a GPU of this compute capability."""
    native = any(
        built[0] == capability[0] and built[1] <= capability[1] for built in _capabilities(architectures, "sm")
    )
    return native or any(built <= capability for built in _capabilities(architectures, "compute"))


def _capabilities(architectures: tuple[str, ...], kind: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(rf"{kind}_(\d+)(\d)[a-z]?", a) for a in architectures]
    return [(int(m[1]), int(m[2])) for m in found if m]


def _pair(text: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def _usable_cuda(gpu: PresentGPU) -> str:
    """The major version of the CUDA builds that the driver runs: within it, minor versions do not matter."""
    return (gpu.cuda_version or "12").partition(".")[0]
