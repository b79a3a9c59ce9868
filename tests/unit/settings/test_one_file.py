"""A technique is one file: a toy beside the real ones is found everywhere, with nothing else touched."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S

import vramfit

TOY = Path(__file__).with_name("toy_calm.py")
LOOK = """
import json, sys
from typer.testing import CliRunner
from vramfit.cli.main import make_app
from vramfit.report.plan import estimate_command
from vramfit.settings import in_words
from vramfit.web.app import _catalogue
from vramfit.web.queries import EstimateQuery
from vramfit.workload import Workload
import vramfit

def help_of(verb):
    return CliRunner().invoke(make_app([verb]), [verb, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output

job = {"batch": 8, "seq": 32, "gpu": "h200", "memory": "2GiB"}
calm, plain = (vramfit.estimate("bert-tiny", batch=8, seq=32, gpu="h200", calm=c) for c in (True, False))
asked = vramfit.plan("bert-tiny", **job, calm=True)
free = vramfit.plan("bert-tiny", **job)
try:
    Workload(model="m", calm=True, compile=True)
    refused = ""
except vramfit.WorkloadError as error:
    refused = str(error)
entry = next((s for s in _catalogue(False).settings if s.keyword == "calm"), None)
print(json.dumps({
    "refused": refused,
    "estimate_help": help_of("estimate"),
    "plan_help": help_of("plan"),
    "train_help": help_of("train"),
    "more_bytes": calm.peak_requested_bytes - plain.peak_requested_bytes,
    "reasons": [[r.setting, r.why] for r in asked.reasons],
    "alternatives": [a.settings for a in free.alternatives],
    "words": in_words(calm.workload),
    "command": estimate_command(asked.workload),
    "schema": EstimateQuery.model_json_schema()["properties"].get("calm"),
    "page": entry and entry.model_dump(),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a copy of the package says that has one file more."""
    folder = tmp_path_factory.mktemp("house")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(vramfit.__file__).parent, folder / "vramfit", ignore=ignored)
    shutil.copy(TOY, folder / "vramfit" / "settings" / "calm.py")
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_workload_has_it_and_says_what_it_contradicts(found: dict[str, Any]) -> None:
    assert "calm and compile do not go together" in found["refused"]


@pytest.mark.parametrize("verb", ["estimate", "plan", "train"])
def test_commands_take_it(found: dict[str, Any], verb: str) -> None:
    assert "--calm" in found[f"{verb}_help"]
    assert "Keep the layers calm." in found[f"{verb}_help"]


def test_what_it_does_to_a_model_is_predicted(found: dict[str, Any]) -> None:
    assert found["more_bytes"] == 4 << 20


def test_plans_try_it_and_give_a_reason_for_it(found: dict[str, Any]) -> None:
    assert ["calm True", "asked for"] in found["reasons"]
    assert any("calm" in settings.split(", ") for settings in found["alternatives"])


def test_reports_and_commands_name_it(found: dict[str, Any]) -> None:
    assert "calm" in found["words"]
    assert "--calm" in found["command"]


def test_the_api_and_the_page_have_it(found: dict[str, Any]) -> None:
    assert found["schema"]["type"] == "boolean"
    assert found["page"]["label"] == "Calm layers"
