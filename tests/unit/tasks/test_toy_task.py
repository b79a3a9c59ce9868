"""A task is one file: put beside the others it is found everywhere, and nothing outside names it."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.training.small_runs import GOOD, write_model
from tests.waiting import LIMIT_S

import vramfit
from vramfit.errors import WorkloadError
from vramfit.tasks import DEFAULT, all_tasks, encoder_alone, find_task, task_names

SOURCE = Path(vramfit.__file__).parent
TOY = Path(__file__).parent / "toy_score.py"
NOT_A_TASK = {
    "checkpoints/key_checks.py": "a kind of weights: those of any head that a model was pretrained with",
    "cli/doctor.py": "a command that its help shows",
    "models/anatomy.py": "an example in a docstring",
}
"""Files that may have the name of a task in them, and why."""
BESIDE = """
import contextlib, io, json, sys
import vramfit.tasks

vramfit.tasks.__path__.append({folder!r})  # as if the file lay there

def said(*arguments):
    from vramfit.cli.main import main
    sys.argv = ["vramfit", *arguments]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main()
    return out.getvalue()

{code}
"""


def beside(tmp_path: Path, code: str) -> Any:
    """What a process prints as JSON that has the toy's file beside those of the real tasks, and nothing else."""
    folder = tmp_path / "more_tasks"
    folder.mkdir()
    shutil.copy(TOY, folder)
    script = BESIDE.format(folder=str(folder), code=code)
    surroundings = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, env=surroundings, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_toy_task_is_found_wherever_tasks_are_chosen(tmp_path: Path) -> None:
    found = beside(
        tmp_path,
        """
import vramfit
from starlette.testclient import TestClient
from vramfit.serve.settings import ServeSettings
from vramfit.web.app import create_app

app = create_app()
schema = app.openapi()["paths"]["/api/estimate"]["get"]["parameters"]
catalogue = TestClient(app, base_url="http://127.0.0.1:8765").get("/api/catalogue").json()
print(json.dumps({
    "workload": vramfit.Workload(model="bert-tiny", task="toy-score").task,
    "estimate --help": said("estimate", "--help"),
    "train --help": said("train", "--help"),
    "doctor --help": said("doctor", "--help"),
    "schema": next(p["schema"]["enum"] for p in schema if p["name"] == "task"),
    "choices": catalogue["choices"]["task"],
    "titles": next(s["labels"] for s in catalogue["settings"] if s["keyword"] == "task"),
    "serve": ServeSettings(model="m", task="toy-score").task,
    "parameters": vramfit.estimate("bert-tiny", task="toy-score", gpu="t4").breakdown["weights"],
    "usual": vramfit.estimate("bert-tiny", gpu="t4").breakdown["weights"],
    "reported": said("estimate", "bert-tiny", "--task", "toy-score", "--gpu", "t4"),
    "planned": vramfit.plan("bert-tiny", task="toy-score", gpu="t4", batch=8).workload.task,
}))
""",
    )
    assert found["workload"] == found["serve"] == found["planned"] == "toy-score"
    for verb in ("estimate", "train", "doctor"):
        assert "toy-score" in found[f"{verb} --help"].replace("\n", "")
    assert found["schema"] == found["choices"] == [*task_names(), "toy-score"]
    assert found["titles"]["toy-score"] == "Toy score"
    assert "bert-tiny · toy-score · train" in found["reported"]
    assert 0 < found["usual"] - found["parameters"] <= 2 * 512  # a head of one number, and not of two


def test_a_toy_task_is_trained_evaluated_and_predicted(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    rows = [f"the film was {word},{number / 4}\n" for number, word in enumerate((*GOOD, *GOOD))]
    (tmp_path / "data.csv").write_text("text,score\n" + "".join(rows))
    found = beside(
        tmp_path,
        f"""
from pathlib import Path
from vramfit.runtime.training.request import TrainRequest
from vramfit.runtime.training.train import train

here = Path({str(tmp_path)!r})
data = str(here / "data.csv")
record = train(TrainRequest(
    model=str(here / "source"), data=data, eval_data=data, output=str(here / "out"), task="toy-score",
    epochs=1, batch=4, lr=1e-4, device="cpu", max_grad_norm=None,
))
told = said("evaluate", str(here / "out"), data, "--task", "toy-score", "--device", "cpu", "--json")
rows = said("predict", str(here / "out"), data, "--task", "toy-score", "--device", "cpu")
print(json.dumps({{
    "steps": record.num_steps, "best": record.best_metric, "value": record.best_value, "loss": record.train_loss,
    "evaluated": json.loads(told)["mean_absolute_error"], "rows": [json.loads(row) for row in rows.splitlines()],
}}))
""",
    )
    assert (found["steps"], found["best"]) == (3, "mean_absolute_error")
    assert found["loss"] > 0
    assert found["evaluated"] == pytest.approx(found["value"], rel=1e-4)
    assert [row["index"] for row in found["rows"]] == list(range(12))
    assert all(isinstance(row["score"], float) for row in found["rows"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert len(config["id2label"]) == 1


def test_a_name_is_found_and_a_wrong_one_has_its_nearest() -> None:
    assert find_task(DEFAULT) is all_tasks()[0]
    assert not encoder_alone().has_head
    with pytest.raises(WorkloadError, match=r"'masked' is not one of .* \(nearest: masked-lm\)"):
        find_task("masked")


def texts_in(path: Path) -> set[str]:
    """Texts of a Python file, docstrings among them; the whole of any other file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return {text}
    nodes = ast.walk(ast.parse(text))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def is_named(task: str, text: str) -> bool:
    """Whether a text names a task; a plain word does so where it stands alone, or is said to be one."""
    if "-" in task:
        return re.search(rf"(?<![\w-]){task}(?![\w-])", text) is not None
    return text == task or re.search(rf"task[ =]+[\"'`]?{task}\b", text) is not None


@pytest.mark.parametrize("task", task_names())
def test_no_source_file_but_its_own_names_a_task(task: str) -> None:
    files = [p for p in SOURCE.rglob("*") if p.suffix in (".py", ".js", ".html")]
    outside = [p for p in files if p.relative_to(SOURCE).parts[0] != "tasks"]
    assert len(outside) > 100
    is_operator = hasattr(torch.ops.aten, task)  # torch has an operator of that name: only `task=…` tells
    named = [(p, text) for p in outside for text in texts_in(p) if is_named(task, text)]
    found = {str(p.relative_to(SOURCE)) for p, text in named if not (is_operator and text == task)}
    assert sorted(found - set(NOT_A_TASK)) == []
