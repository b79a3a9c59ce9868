"""Importing vramfit and answering quick questions costs no torch, no transformers and few modules."""

import inspect
import json
import subprocess
import sys

import pytest

from vramfit.cli.main import VERBS, find_verb, told

HEAVY = ("torch", "transformers", "numpy", "huggingface_hub", "safetensors", "fastapi")
MAX_MODULES = 500
"""Of a quick command: a third more than it imports, most of them of Python, typer and rich. torch alone has 1,000."""
RUN = """import sys
from vramfit.__main__ import main
sys.argv = ["vramfit", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print()"""


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


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
    imported = modules_after(RUN.format(arguments=arguments))
    assert imported.isdisjoint(HEAVY)
    assert len(imported) <= MAX_MODULES


def test_listing_the_verbs_says_what_each_says_itself() -> None:
    for name in VERBS:
        own = inspect.getdoc(find_verb(name)) or ""
        assert " ".join(own.split("\n\n")[0].split()) == told(name)


def test_garbage_is_collected_once_a_verb_runs() -> None:
    script = (
        "import gc, sys, vramfit.cli.catalogue as verb\n"
        "from vramfit.__main__ import main\n"
        "verb.all_gpus = lambda: sys.exit(3 if gc.isenabled() else 4)\n"
        "sys.argv = ['vramfit', 'gpus']\n"
        "main()"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 3
