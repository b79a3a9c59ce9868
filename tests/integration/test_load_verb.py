"""`vramfit load`, end to end: what it prints, what it refuses, how it leaves."""

import json
from pathlib import Path

import pytest

from tests.integration.command import vramfit
from tests.unit.loader.checkpoints import minilm, write
from vramfit.estimator.predict import estimate
from vramfit.records.codec import from_data
from vramfit.records.finding import LoadReport


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "small"
    write(path)
    return path


def test_a_folder_is_loaded_and_reported(folder: Path) -> None:
    done = vramfit("load", str(folder), "--device", "cpu")
    assert done.code == 0, done.err
    assert "BertForSequenceClassification, fp32, on cpu" in " ".join(done.out.split())
    assert "model.safetensors" in done.out
    assert done.err == ""


def test_json_is_the_report_and_nothing_else(folder: Path) -> None:
    done = vramfit("load", str(folder), "--device", "cpu", "--precision", "bf16", "--task", "features", "--json")
    report = from_data(LoadReport, json.loads(done.out))
    assert (report.precision, report.task, report.device) == ("bf16", "features", "cpu")
    assert set(report.dropped) == {"classifier.weight", "classifier.bias"}
    assert report.peak_device_bytes is None


@pytest.mark.slow
def test_a_check_prints_what_fewer_bits_change() -> None:
    pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    done = vramfit("load", str(minilm()), "--quantize", "int8", "--device", "cpu", "--check", "--json")
    assert done.code == 0, done.err
    report = from_data(LoadReport, json.loads(done.out))
    assert report.comparison is not None
    assert report.comparison.cosine >= 0.999
    assert report.comparison.inputs == "sentences"
    assert report.comparison.label_agreement is not None


def test_a_check_in_the_terminal_names_cosine_and_difference(folder: Path) -> None:
    done = vramfit("load", str(folder), "--precision", "bf16", "--device", "cpu", "--check")
    assert done.code == 0, done.err
    for words in (
        "Compared with full precision",
        "random ids",
        "largest difference",
        "lowest cosine",
        "same top label",
    ):
        assert words in done.out


def test_random_weights_are_only_drawn_when_asked() -> None:
    done = vramfit("load", "bert-tiny", "--device", "cpu")
    assert done.code == 1
    assert "--random-weights" in done.err
    done = vramfit("load", "bert-tiny", "--random-weights", "--device", "cpu")
    assert (done.code, "random, the same for the same seed" in done.out) == (0, True)


def test_a_wrong_quantization_is_a_usage_error_with_the_right_names() -> None:
    done = vramfit("load", "bert-tiny", "--random-weights", "--quantize", "fp16")
    assert done.code == 2
    assert "int8, int8-dynamic, int4" in done.err
    assert "fp16 is a precision: take --precision fp16" in done.err
    assert "Traceback" not in done.err


def test_weights_beyond_the_memory_leave_with_3_and_offloading_helps() -> None:
    arguments = ("load", "bert-mini", "--random-weights", "--device", "cpu", "--memory", "40MiB")
    done = vramfit(*arguments)
    assert done.code == 3
    assert "40.00 MiB are allowed" in done.err
    done = vramfit(*arguments, "--offload", "weights")
    assert done.code == 0, done.err
    assert "layers wait in host memory" in done.out


def test_with_a_batch_the_layers_that_stay_are_those_predicted() -> None:
    arguments = ("bert-base-uncased", "--memory", "350MiB", "--offload", "weights")
    job = ("--batch", "4", "--seq", "512")
    done = vramfit("load", *arguments, *job, "--random-weights", "--device", "cpu", "--json")
    assert done.code == 0, done.err
    report = from_data(LoadReport, json.loads(done.out))
    predicted = estimate(arguments[0], mode="infer", batch=4, seq=512, memory="350MiB", offload="weights")
    assert predicted.fits
    alone = vramfit("load", *arguments, "--random-weights", "--device", "cpu", "--json")
    assert 0 < report.num_resident_layers < from_data(LoadReport, json.loads(alone.out)).num_resident_layers
    done = vramfit("load", "bert-mini", "--memory", "40MiB", "--offload", "weights", "--batch", "64")
    assert done.code == 3
    assert "with every layer offloaded, and the memory is 40.00 MiB" in done.err
    assert vramfit("load", "bert-mini", "--batch", "64").code == 2


def test_a_damaged_file_leaves_with_1_and_names_it(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: -100 if file.suffix == ".safetensors" else None])
    done = vramfit("load", str(tmp_path), "--device", "cpu")
    assert done.code == 1
    assert "model.safetensors" in done.err
    assert "Traceback" not in done.err


def test_a_scan_finds_a_weight_that_is_not_a_number(folder: Path, tmp_path: Path) -> None:
    from tests.unit.loader.checkpoints import rewrite

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    rewrite(tmp_path, lambda t: t | {"bert.pooler.dense.bias": t["bert.pooler.dense.bias"] * float("nan")})
    done = vramfit("load", str(tmp_path), "--device", "cpu", "--scan")
    assert "bert.pooler.dense.bias" in done.out + done.err
    done = vramfit("load", str(tmp_path), "--device", "cpu", "--precision", "bf16", "--check")
    assert (done.code, done.out) == (1, "")
    assert "NaN or infinite for 16 of 16 samples" in done.err
    assert "--scan" in done.err


def test_help_has_an_example() -> None:
    done = vramfit("load", "--help")
    assert done.code == 0
    assert "vramfit load ./my-model" in done.out
