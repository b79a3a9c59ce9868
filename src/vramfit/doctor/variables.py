"""Environment variables that change what is allocated, and what each of them does here."""

from vramfit.doctor.environment import Environment
from vramfit.records.finding import Finding, Severity

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
    "CUDA_MODULE_LOADING": (
        "info",
        "EAGER loads all kernels at start: hundreds of MiB more context",
        "unset it",
    ),
    "CUDA_VISIBLE_DEVICES": ("info", "hides GPUs or renumbers them", ""),
    "HF_HUB_OFFLINE": ("info", "models are found in the catalogue, in folders and in the cache only", ""),
    "NVIDIA_TF32_OVERRIDE": (
        "warning",
        "overrides the precision of products that a program asked for",
        "unset it",
    ),
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


def check_variables(env: Environment) -> list[Finding]:
    """One finding for each variable that is set."""
    findings = []
    for name, value in env.variables.items():
        severity, why, fix = MEANING[name]
        findings.append(
            Finding(check=f"variable.{name}", severity=severity, what=f"{name}={value[:120]}", why=why, fix=fix)
        )
    both = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} <= set(env.variables)
    if both and len({env.variables["PYTORCH_ALLOC_CONF"], env.variables["PYTORCH_CUDA_ALLOC_CONF"]}) == 2:
        findings.append(
            Finding(
                check="variable.PYTORCH_ALLOC_CONF",
                severity="warning",
                what="PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF are both set and differ",
                why="newer torch releases read the first, older ones only the second",
                fix="keep one, or set both alike",
            )
        )
    return findings
