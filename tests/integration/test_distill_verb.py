"""`vramfit distill` and `vramfit compare` as a user runs them."""

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.command import vramfit
from tests.unit.runtime.training.small_runs import run, write_classes, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("distilled")
    write_model(made / "source", num_hidden_layers=4)
    write_classes(made / "train.csv", num_rows=64)
    write_classes(made / "dev.csv", num_rows=20, seed=5)
    run(made, output=str(made / "teacher"), epochs=2, lr=3e-3)
    return made


def test_a_student_is_made_trained_and_compared(folder: Path) -> None:
    teacher, small, dev = (str(folder / name) for name in ("teacher", "small", "dev.csv"))
    how = ("--max-steps", "3", "--device", "emulated", "--memory", "64MiB", "--eval-data", dev)
    done = vramfit("distill", teacher, str(folder / "train.csv"), "--output", small, *how, "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record["teacher"] == teacher
    assert record["settings"]["distill"] == "logits"
    assert "The student has 2 of the teacher's 4 layers" in done.err
    assert "learns without it in memory" in done.err
    page = str(folder / "compared.html")
    done = vramfit("compare", teacher, small, "--data", dev, "--device", "cpu", "--html", page)
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()[:3]] == ["model", "teacher", "small"]
    assert Path(page).read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--keep-layers", "9"), 2, "keep_layers 9: the teacher has 4 layers, and a student has fewer"),
        (("--keep-layers", "two"), 2, "--keep-layers 'two' is neither a number nor a list"),
        (("--hidden-size", "20"), 2, "hidden_size 20: the teacher has 2 heads of 16, 32 together"),
        (("--distill", "relations", "--teacher-answers", "disk"), 2, "distill relations needs the teacher in memory"),
        (("--student", "nobody/nothing-of-the-kind"), 2, "unknown model"),
        (("--label-column", "colour"), 1, "colour"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(folder: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    shutil.rmtree(folder / "out", ignore_errors=True)
    given = (str(folder / "teacher"), str(folder / "train.csv"), "--output", str(folder / "out"), *arguments)
    done = vramfit("distill", *given, "--device", "cpu")
    assert (done.code, done.out) == (code, ""), done.err
    assert said in done.err
    assert "Traceback" not in done.err
