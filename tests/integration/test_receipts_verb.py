"""`vramfit receipts`, and the receipts that `measure` and `train` write."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.records.receipts import KEYWORDS, measured_as, receipt
from tests.unit.runtime.training.small_runs import write_classes, write_model
from vramfit.cli.main import make_app
from vramfit.estimator.predict import estimate
from vramfit.records.receipt import read_receipt, write_receipt

JOB = ["bert-tiny", "--batch", "4", "--seq", "16", "--precision", "amp-fp16"]


def test_a_folder_is_shown_and_a_forged_receipt_refused(tmp_path: Path) -> None:
    write_receipt(receipt(), tmp_path / "good.json")
    text = (tmp_path / "good.json").read_text(encoding="utf-8")
    (tmp_path / "forged.json").write_text(text.replace('"num_retries": 0', '"num_retries": 9'), encoding="utf-8")
    done = CliRunner(env={"COLUMNS": "120"}).invoke(make_app(["receipts", "gpus"]), ["receipts", str(tmp_path)])
    assert done.exit_code == 1
    assert "Tesla T4" in done.output
    assert "Refused forged.json: the digest is not that of the content" in done.output
    assert "sm_75 with torch 2.11: not measured yet: 1 receipt, and 3 of different jobs are needed." in done.output


def test_json_has_the_good_ones_and_why_others_are_refused(tmp_path: Path) -> None:
    write_receipt(receipt(), tmp_path / "good.json")
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    done = CliRunner().invoke(make_app(["receipts", "gpus"]), ["receipts", str(tmp_path), "--json"])
    said = json.loads(done.stdout)
    assert [r["gpu"] for r in said["receipts"]] == ["Tesla T4"]
    assert said["refused"]["bad.json"].startswith("not JSON")


def test_with_repeat_a_prediction_that_nobody_made_is_refused(tmp_path: Path) -> None:
    mine = receipt(settings=KEYWORDS, transformers_version=version("transformers"))
    write_receipt(mine, tmp_path / "made-up.json")
    done = CliRunner().invoke(make_app(["receipts", "gpus"]), ["receipts", str(tmp_path), "--repeat"])
    assert done.exit_code == 1
    assert "though it names the same vramfit and transformers" in done.output


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_where_there_are_none_it_says_how_to_make_one(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(make_app(["receipts", "gpus"]), ["receipts", str(tmp_path / folder)])
    assert done.exit_code == 1
    assert "--receipt FILE" in done.exception.hint  # type: ignore[union-attr]


def test_measure_predicts_first_and_writes_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    predicted = estimate("bert-tiny", gpu="t4", **KEYWORDS)
    monkeypatch.setattr("vramfit.cli.estimate.look_at_driver", lambda hint: None)
    monkeypatch.setattr(
        "vramfit.cli.estimate._predict", lambda *_, **__: order.append("predicted") or ([predicted], None)
    )
    monkeypatch.setattr("vramfit.cli.estimate._measure", lambda *_: order.append("measured") or measured_as(predicted))
    path = tmp_path / "t4.json"
    arguments = ["measure", *JOB, "--gpu", "t4", "--receipt", str(path)]
    done = CliRunner().invoke(make_app(["measure", "gpus"]), arguments)
    assert done.exit_code == 0, done.output
    assert order == ["predicted", "measured"]
    assert read_receipt(path).agrees


def test_train_writes_a_receipt_of_the_emulated_gpu(tmp_path: Path) -> None:
    model, data = write_model(tmp_path / "source"), write_classes(tmp_path / "train.csv")
    where = ["--output", str(tmp_path / "out"), "--device", "emulated", "--memory", "200MiB", "--max-steps", "1"]
    arguments = ["train", str(data), "--model", str(model), *where, "--receipt", str(tmp_path / "r.json")]
    done = CliRunner().invoke(make_app(["train", "gpus"]), arguments)
    assert done.exit_code == 0, done.output
    assert read_receipt(tmp_path / "r.json").is_emulated


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--device", "cpu", "--receipt", "r.json"], "a run on the CPU has no receipt"),
        (["--receipt", "."], "is a folder"),
        (["--receipt", "nowhere/r.json"], "there is no such folder"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_runs(
    arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "source")
    write_classes(tmp_path / "train.csv")
    done = CliRunner().invoke(
        make_app(["train", "gpus"]), ["train", "train.csv", "--model", "source", "--output", "out", *arguments]
    )
    assert why in str(done.exception)
    assert not (tmp_path / "out").exists()
