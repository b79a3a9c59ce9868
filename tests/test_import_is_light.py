"""Importing vramfit and answering quick questions costs no torch, no transformers and no time."""

import json
import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "huggingface_hub", "safetensors", "fastapi")
MAX_CPU_S = 0.3


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def cpu_seconds(*arguments: str) -> float:
    """CPU time of one command, the best of three: the first may still be writing bytecode."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "vramfit", *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


@pytest.mark.parametrize(
    "code",
    [
        "import vramfit",
        "import vramfit; vramfit.Workload(model='m'); vramfit.VramfitError",
        "import vramfit.cli.main",
        "import vramfit.devices.catalogue as c; c.all_gpus()",
        "import vramfit.models.catalogue as c; c.model_names()",
        "import vramfit.serve.server",
        "import vramfit.integrations.sagemaker",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    assert modules_after(code).isdisjoint(HEAVY)


def test_importing_sets_no_environment_variable() -> None:
    script = "import os; before = dict(os.environ); import vramfit, vramfit.cli.main; print(dict(os.environ) == before)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("gpus",), ("models",)])
def test_quick_commands_are_quick(arguments: tuple[str, ...]) -> None:
    assert cpu_seconds(*arguments) < MAX_CPU_S
