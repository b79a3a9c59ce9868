"""`vramfit doctor MODEL`: folders, names without weights, JSON and exit codes."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.unit.checkpoints.broken import load_script
from tests.unit.models.sentence_folders import write_folder, write_json
from typer.testing import CliRunner

from vramfit.cli.main import make_app
from vramfit.doctor.checkup import check_model
from vramfit.errors import UnknownModel

script = load_script()
runner = CliRunner()


def test_a_sound_model_leaves_with_zero(sound_folder: Path) -> None:
    done = runner.invoke(make_app(), ["doctor", str(sound_folder)])
    assert done.exit_code == 0
    assert "No problems found." in done.output


def test_a_broken_model_leaves_with_one_and_says_what_to_do(sound_folder: Path, tmp_path: Path) -> None:
    done = runner.invoke(make_app(), ["doctor", str(script.make("truncated", sound_folder, tmp_path))])
    assert done.exit_code == 1
    assert "is cut off" in " ".join(done.output.split())
    assert "1 error." in done.output


def test_json_is_an_array_of_findings(sound_folder: Path, tmp_path: Path) -> None:
    done = runner.invoke(make_app(), ["doctor", str(script.make("nan", sound_folder, tmp_path)), "--scan", "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found[0]["check"] == "scan.not_finite"
    assert set(found[0]) == {"check", "severity", "what", "why", "fix", "fatal"}


def test_a_catalogue_name_without_weights_has_its_configuration_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramfit.doctor.checkup.cached_snapshot", lambda _: None)
    found = {f.check: f for f in check_model("bert-tiny")}
    assert found["weights.absent"].severity == "info"
    assert "hf download prajjwal1/bert-tiny" in found["weights.absent"].fix
    assert "4,386,178 parameters" in found["config"].what


def test_a_catalogue_name_with_weights_in_the_cache_has_them_checked(
    monkeypatch: pytest.MonkeyPatch, sound_folder: Path
) -> None:
    monkeypatch.setattr("vramfit.doctor.checkup.cached_snapshot", lambda _: sound_folder)
    assert any(f.check.startswith("weights.shape") for f in check_model("bert-tiny", task="features"))


def test_the_task_decides_which_head_is_new(sound_folder: Path) -> None:
    done = runner.invoke(make_app(), ["doctor", str(sound_folder), "--task", "question-answering"])
    assert "qa_outputs" in done.output


def test_an_unknown_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownModel):
        check_model("no such model")


def test_a_damaged_configuration_is_a_finding_too(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    (found,) = check_model(folder)
    assert (found.check, found.fatal) == ("checkpoint.damaged", True)
    assert "is not JSON" in found.what


def test_the_head_of_a_folder_that_pools_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path, "Dense", "Normalize")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"q": "query: "}, "default_prompt_name": "q"})
    found = {finding.check: finding for finding in check_model(folder, task="embedding", scan=True)}
    assert "pooled by mean, then go through Dense, Normalize (2 tensors" in found["embedding.head"].what
    assert "'query: ' goes before every text" in found["embedding.prompt"].what
    assert not {"weights.missing", "weights.head_new", "weights.unexpected"} & set(found)
    dense = folder / "2_Dense" / "model.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(dense).items()}, dense)
    assert "scan.not_finite" in {finding.check for finding in check_model(folder, task="embedding", scan=True)}
    monkeypatch.setattr("vramfit.doctor.checkup.cached_snapshot", lambda _: folder)
    by_name = check_model("bert-tiny", task="embedding")  # the weights are of another size; the head is read
    assert "takes vectors of 32 numbers" in by_name[0].what
    dense.unlink()
    (finding,) = check_model(folder, task="embedding")
    assert (finding.check, finding.fatal) == ("checkpoint.damaged", True)
    assert "2_Dense holds no weights" in finding.what
