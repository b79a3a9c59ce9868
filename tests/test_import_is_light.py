"""Importing vramfit and answering quick questions costs no torch, no transformers and no time."""

import inspect
import json
import resource
import subprocess
import sys
from importlib import import_module

import pytest

from vramfit.cli.main import VERBS

HEAVY = ("torch", "transformers", "numpy", "huggingface_hub", "safetensors", "fastapi")
MAX_CPU_S = 0.3
TRIES = 10


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def cpu_seconds(*arguments: str) -> float:
    """CPU time of one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "vramfit", *arguments], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
    # what shares the cores only ever adds: the quickest run is the command's own time
    times: list[float] = []
    while len(times) < TRIES and min(times, default=MAX_CPU_S) >= MAX_CPU_S:
        times.append(cpu_seconds(*arguments))
    assert min(times) < MAX_CPU_S


def test_listing_the_verbs_says_what_each_says_itself() -> None:
    for name, told in VERBS.items():
        verb = import_module(f"vramfit.cli.{name.replace('-', '_')}")
        own = inspect.getdoc(verb.run) or ""
        assert " ".join(own.split("\n\n")[0].split()) == told


def test_garbage_is_collected_once_a_verb_runs() -> None:
    script = (
        "import gc, sys, vramfit.cli.gpus as verb\n"
        "from vramfit.__main__ import main\n"
        "verb.all_gpus = lambda: sys.exit(3 if gc.isenabled() else 4)\n"
        "sys.argv = ['vramfit', 'gpus']\n"
        "main()"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 3
