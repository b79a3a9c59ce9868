"""What a job is told: by files, and by the variables of both launchers."""

import importlib.util
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.unit.integrations.sagemaker.job_folders import write_job

from vramfit.errors import DataError, NoPlanFits, VramfitError, WorkloadError
from vramfit.integrations.sagemaker.entry import (
    needs_torchrun,
    reason_of,
    run_command,
    torchrun_command,
    train_arguments,
)
from vramfit.integrations.sagemaker.job import Job, make_request, output_folder, read_arguments, read_job
from vramfit.runtime.training.events import Terminated
from vramfit.units import GIB


def job_of(base: Path, **environment: str) -> Job:
    return read_job(None, {"SAGEMAKER_BASE_DIR": str(base), **environment})


def changed(tmp_path: Path, hyperparameters: dict[str, str]) -> Any:
    base = tmp_path / "ml"
    if not base.exists():
        write_job(base)
    return make_request(read_job({"model": "bert-tiny", **hyperparameters}, {"SAGEMAKER_BASE_DIR": str(base)}))


def test_files_tell_everything(tmp_path: Path) -> None:
    job = job_of(write_job(tmp_path / "ml"))
    assert job.hyperparameters["epochs"] == "2"
    assert (job.hosts, job.current_host, job.num_gpus, job.instance) == (("algo-1",), "algo-1", 1, "ml.g4dn.xlarge")
    request = make_request(job)
    assert request.data == str(tmp_path / "ml/input/data/train/rows.csv")
    assert request.eval_data == str(tmp_path / "ml/input/data/validation/rows.csv")
    assert request.output == str(tmp_path / "ml/checkpoints/run")
    assert (request.epochs, request.batch, request.lr, request.resume) == (2.0, 8, 1e-3, True)
    assert output_folder({"SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}) == tmp_path / "ml/output"


@pytest.mark.parametrize(
    "style",
    [
        {"SM_HPS": json.dumps({"learning-rate": 3e-5, "epochs": 2, "fp16": True}), "SM_HP_LEARNING-RATE": "3e-5"},
        {"SM_HPS": json.dumps({"learning_rate": "3e-5", "epochs": "2", "fp16": "true"}), "SM_HP_LEARNING_RATE": "3e-5"},
        {"SM_HP_LEARNING_RATE": "3e-5", "SM_HP_EPOCHS": "2", "SM_HP_FP16": "True"},
        {"SM_HP_LEARNING-RATE": "3e-5", "SM_HP_EPOCHS": "2", "SM_HP_FP16": "1"},
    ],
    ids=["toolkit", "drivers", "single underscores", "single hyphens"],
)
def test_both_launchers_variables_say_the_same(tmp_path: Path, style: dict[str, str]) -> None:
    base = write_job(tmp_path / "ml")
    (base / "input/config/hyperparameters.json").unlink()
    folders = {
        "SM_CHANNEL_TRAIN": str(base / "input/data/train"),
        "SM_MODEL_DIR": str(tmp_path / "m"),
        "SM_OUTPUT_DATA_DIR": str(tmp_path / "o"),
        "SM_HOSTS": '["algo-1", "algo-2"]',
        "SM_CURRENT_HOST": "algo-2",
        "SM_NUM_GPUS": "4",
        "SM_CHANNEL_MODEL": str(tmp_path / "source"),
    }
    job = job_of(base, **folders, **style)
    assert (job.model_dir, job.output_data_dir, job.num_gpus) == (tmp_path / "m", tmp_path / "o", 4)
    assert (job.hosts, job.current_host) == (("algo-1", "algo-2"), "algo-2")
    request = make_request(job)
    assert (request.lr, request.epochs, request.precision) == (3e-5, 2.0, "amp-fp16")
    assert request.model == str(tmp_path / "source")


def test_hyperparameters_are_texts_in_every_spelling(tmp_path: Path) -> None:
    given = {
        "batch-size": "16",
        "max_seq_length": "48",
        "Skip-Bad-Rows": "True",
        "trust_remote_code": "false",
        "text-column": "text",
        "allow": "freeze, lora",
        "freeze": "2",
        "checkpointing": "full",
        "task": '"sequence-classification"',
        "max_steps": "10.0",
        "memory": "2GiB",
        "precision": "None",
        "bf16": "False",
        "sagemaker_program": "train.py",
        "model_dir": "s3://bucket/model",
        "_tuning_objective_metric": "eval:accuracy",
    }
    made = changed(tmp_path, given)
    assert (made.batch, made.seq, made.skip_bad_rows, made.trust_remote_code) == (16, 48, True, False)
    assert (made.text_columns, made.allow, made.freeze, made.checkpointing) == (
        ("text",),
        ("freeze", "lora"),
        2,
        "full",
    )
    assert (made.task, made.max_steps, made.memory, made.precision) == ("sequence-classification", 10, 2 * GIB, None)


def test_every_wrong_hyperparameter_is_named_at_once(tmp_path: Path) -> None:
    wrong = {"epocs": "3", "batch": "many", "seed": "1.5", "fp16": "maybe", "output": "/tmp"}
    with pytest.raises(WorkloadError) as caught:
        changed(tmp_path, wrong)
    said = "; ".join(caught.value.problems)
    for words in (
        "epocs is not known (nearest: epochs)",
        "batch 'many' is not a whole number",
        "seed '1.5' is not a whole number",
        "fp16 'maybe' is not True or False",
        "output is the job's to decide",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"lr": "1e-3", "learning_rate": "1e-4"},
            "learning_rate makes lr 0.0001, and another makes it 0.001: give one",
        ),
        ({"fp16": "True", "bf16": "True"}, "bf16 makes precision amp-bf16, and another makes it amp-fp16: give one"),
        ({"warmup_ratio": "0.1", "warmup_steps": "10"}, "warmup_steps makes warmup 10.0, and another makes it 0.1"),
    ],
)
def test_hyperparameters_that_contradict_each_other_are_refused(
    tmp_path: Path, given: dict[str, str], words: str
) -> None:
    with pytest.raises(WorkloadError, match=words):
        changed(tmp_path, given)
    same = {"lr": "1e-3", "learning_rate": "0.001", "fp16": "True", "precision": "amp-fp16"}
    assert changed(tmp_path, same).lr == 1e-3


def test_no_option_is_named_that_a_job_does_not_have() -> None:
    error = VramfitError("cannot resume", hint="give the same settings, or start anew with another --output")
    said = "cannot resume; give the same settings, or start anew with another checkpoint_s3_uri"
    assert reason_of(error, None, None) == said


def test_arguments_are_pairs_switches_and_equations() -> None:
    assert read_arguments(["--a", "1", "--b=2", "--c", "--d", "-3", "--e", "-1e-5"]) == {
        "a": "1",
        "b": "2",
        "c": "true",
        "d": "-3",
        "e": "-1e-5",
    }
    with pytest.raises(WorkloadError, match="has no name"):
        read_arguments(["lost"])


def test_a_channel_that_is_missing_empty_or_crowded_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no channel 'train'; the job has none"):
        make_request(job_of(write_job(tmp_path / "none", channels=False)))
    base = write_job(tmp_path / "ml")
    folder = base / "input/data/train"
    (folder / "more.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"2 files of data: more\.jsonl, rows\.csv") as caught:
        make_request(job_of(base))
    assert "train-file" in (caught.value.hint or "")
    named = read_job({"model": "m", "train-file": "rows.csv"}, {"SAGEMAKER_BASE_DIR": str(base)})
    assert make_request(named).data.endswith("rows.csv")
    with pytest.raises(DataError, match=r"has no 'other\.csv'"):
        make_request(read_job({"model": "m", "train-file": "other.csv"}, {"SAGEMAKER_BASE_DIR": str(base)}))
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(DataError, match="no file of data: nothing"):
        make_request(job_of(base))


def test_a_damaged_configuration_is_an_error_in_words(tmp_path: Path) -> None:
    base = write_job(tmp_path / "ml")
    (base / "input/config/hyperparameters.json").write_text("{")
    with pytest.raises(VramfitError, match=r"hyperparameters.json is not JSON"):
        job_of(base)


def test_torchrun_is_told_hosts_and_gpus(tmp_path: Path) -> None:
    base = write_job(tmp_path / "ml")
    two = {"SM_HOSTS": "algo-1,algo-2", "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
    job = read_job({"model": "bert-tiny"}, {"SAGEMAKER_BASE_DIR": str(base), **two})
    request = make_request(job)
    assert needs_torchrun(job, request, {})
    assert not needs_torchrun(job, request, {"RANK": "0"})
    command = torchrun_command(job, request)
    assert command[1:8] == [
        *("-m", "torch.distributed.run", "--nproc-per-node=8", "--nnodes=2", "--node-rank=1"),
        *("--master-addr=algo-1", "--master-port=29500"),
    ]
    assert command[8:11] == ["-m", "vramfit", "train"]
    alone = job_of(base)
    assert not needs_torchrun(alone, make_request(alone), {})


@pytest.mark.parametrize(
    "switches",
    [{"allow": "freeze,lora", "freeze": "embeddings,2"}, {"exact": "1"}, {"compile": "True"}, {"compile": "false"}],
)
def test_the_command_line_asks_for_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switches: dict[str, str]
) -> None:
    from typer.testing import CliRunner

    from vramfit.cli.main import make_app
    from vramfit.runtime.training import train as training

    given = {**switches, "text-column": "text", "max_grad_norm": "2", "lr": "1e-4"}
    request = changed(tmp_path, given | {"skip-bad-rows": "1", "epochs": "1.5", "memory": "2GiB", "seed": "4"})
    asked: list[Any] = []

    def note(request: Any, **keywords: Any) -> None:
        asked.append(request)
        raise VramfitError("enough")

    monkeypatch.setattr(training, "train", note)
    CliRunner().invoke(make_app(["train", "web"]), ["train", *train_arguments(request)])
    assert asked == [request]


def test_what_processes_said_last_is_the_error(capfd: pytest.CaptureFixture[str]) -> None:
    words = "noise\nError: no room\n  → take less\nexitcode  : 3 (pid: 7)\n"
    said = f"import sys; sys.stderr.write({words!r}); sys.exit(1)"
    with pytest.raises(NoPlanFits, match="no room") as caught:
        run_command([sys.executable, "-c", said])
    assert caught.value.hint == "take less"
    assert "noise" in capfd.readouterr().err
    run_command([sys.executable, "-c", ""])
    with pytest.raises(VramfitError, match="torchrun ended with 5"):
        run_command([sys.executable, "-c", "import sys; sys.exit(5)"])


def test_sigterm_is_passed_on_to_the_processes() -> None:
    waits = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    with pytest.raises(Terminated):
        run_command([sys.executable, "-c", waits])


def test_a_model_that_an_earlier_job_packed_is_unpacked(tmp_path: Path) -> None:
    base = write_job(tmp_path / "ml")
    channel = base / "input/data/model"
    channel.mkdir()
    with tarfile.open(channel / "model.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "source/config.json", "config.json")
    path = base / "input/config/hyperparameters.json"
    path.write_text(json.dumps({"epochs": "1"}))
    job = job_of(base, SM_CHANNEL_MODEL=str(channel))
    assert Path(make_request(job).model, "config.json").exists()
    (channel / "model.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"cannot unpack model\.tar\.gz"):
        make_request(job)


def test_the_dockerfile_names_what_is_there() -> None:
    root = Path(__file__).parents[4]
    lines = (root / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert {"src", "pyproject.toml"} <= set(copied)
    assert all((root / name).exists() for name in copied)
    entry = json.loads(next(line for line in lines if line.startswith("ENTRYPOINT")).removeprefix("ENTRYPOINT "))
    assert any("gcc" in line for line in lines)  # without it, Triton cannot run
    assert entry[:2] == ["python", "-m"]
    assert importlib.util.find_spec(f"{entry[2]}.__main__") is not None
