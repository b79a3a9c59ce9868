"""`vramfit encode` as users run it: killed and gone on with, interrupted, from standard input, with wrong names."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.integration.command import Done, vramfit
from tests.unit.models.sentence_folders import write_folder, write_json
from tests.unit.runtime.training.small_runs import BAD, GOOD, write_model
from tests.waiting import LIMIT_S, running, wait_until
from tests.warm import WarmProcess
from vramfit.runtime.encoding.texts import HOST_PART_ROWS

NUM_PARTS = 5


def run(*arguments: str, stdin: str | None = None) -> Done:
    return vramfit(*arguments, stdin=stdin, OMP_NUM_THREADS="1", COLUMNS="150")


def num_kept(manifest: Path) -> int:
    return int(json.loads(manifest.read_text())["num_vectors"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("encode")
    write_model(made / "model")
    words = (*GOOD, *BAD)
    rows = [f"{words[n % 12]} film {words[n % 7]} {'the music ' * (n % 5)}" for n in range(NUM_PARTS * HOST_PART_ROWS)]
    (made / "rows.txt").write_text("\n".join(rows) + "\n")
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    done = run("encode", str(folder / "model"), str(folder / "rows.txt"), "-o", str(folder / "whole.npy"))
    assert done.code == 0, done.err
    assert f"{NUM_PARTS * HOST_PART_ROWS:,} vectors of 32 numbers (float32) in {folder / 'whole.npy'}" in done.out
    assert "Computed in fp32" in done.err
    assert "texts/s" in done.err
    return folder / "whole.npy"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_goes_on(folder: Path, whole: Path, tmp_path: Path, how: signal.Signals) -> None:
    output = tmp_path / "vectors.npy"
    command = [sys.executable, "-m", "vramfit", "encode", str(folder / "model"), "-", "-o", str(output)]
    rows = (folder / "rows.txt").read_text()
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with running(command, start=WarmProcess, **pipes) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(rows)  # all but its end: the last part never comes
        process.stdin.flush()
        manifest = output.with_name("vectors.npy.manifest.json")
        wait_until(lambda: manifest.exists() and num_kept(manifest), "the first part", child=process)
        process.send_signal(how)
        said = process.stderr.read()
        code = process.wait(LIMIT_S)
    assert not output.exists()
    kept = num_kept(manifest)
    assert 0 < kept < NUM_PARTS * HOST_PART_ROWS
    if how == signal.SIGINT:
        assert code == 130
        assert f"Interrupted: {kept:,} vectors are kept; go on after them: --resume." in said
    again = run("encode", str(folder / "model"), "-", "-o", str(output), stdin=rows)
    assert again.code == 1
    assert "go on with it: --resume" in again.err
    done = run("encode", str(folder / "model"), "-", "-o", str(output), "--resume", "--json", stdin=rows)
    assert done.code == 0, done.err
    assert json.loads(done.out)["num_encoded"] == NUM_PARTS * HOST_PART_ROWS - kept
    assert output.read_bytes() == whole.read_bytes()
    other = run("encode", str(folder / "model"), "-", "-o", str(output), "--resume", "--dims", "8", stdin=rows)
    assert other.code == 1
    assert "dims was None, and is 8 now" in other.err


def test_a_column_of_a_table_is_encoded_with_its_bad_rows_left_out(folder: Path, tmp_path: Path) -> None:
    data, output = tmp_path / "rows.csv", tmp_path / "vectors.npy"
    data.write_text("id,title,body\n1,great film,x\n2,,x\n3,dull,x\n")
    arguments = ("encode", str(folder / "model"), str(data), "-o", str(output), "--text-column", "title")
    refused = run(*arguments)
    assert refused.code == 1
    assert "rows.csv: 1 of 3 rows cannot be used: row 3: title is empty" in refused.err
    assert not list(tmp_path.glob("vectors*"))
    done = run(*arguments, "--skip-bad-rows", "--dtype", "int8", "--dims", "8")
    assert done.code == 0, done.err
    assert "1 row left out; the first is row 3: title is empty" in done.err
    assert "Note: ranges of int8 are those of the first 2 vectors" in done.err
    assert np.load(output).shape == (2, 8)
    assert np.load(tmp_path / "vectors.index.npy").tolist() == [0, 2]


def test_the_default_prompt_of_a_folder_goes_before_texts_in_every_verb(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", "Normalize")
    prompts = {"prompts": {"q": "anna saw "}, "default_prompt_name": "q"}
    write_json(model / "config_sentence_transformers.json", prompts)
    (tmp_path / "rows.txt").write_text("great film\ndull\n")
    (tmp_path / "prompted.txt").write_text("anna saw great film\nanna saw dull\n")
    done = run("encode", str(model), str(tmp_path / "rows.txt"), "-o", str(tmp_path / "vectors.npy"))
    assert "Every text went in after 'anna saw '" in done.err
    arguments = ("-o", str(tmp_path / "plain.npy"), "--prompt", "")
    assert run("encode", str(model), str(tmp_path / "prompted.txt"), *arguments).code == 0
    predicted = run("predict", str(model), str(tmp_path / "rows.txt"), "--device", "cpu")
    vectors = np.array([json.loads(line)["embedding"] for line in predicted.out.splitlines()])
    assert np.abs(np.load(tmp_path / "vectors.npy") - np.load(tmp_path / "plain.npy")).max() < 1e-6
    assert np.abs(vectors - np.load(tmp_path / "plain.npy")).max() < 1e-6


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("MODEL", "DATA", "-o", "OUT.txt"), 2, "its ending is none of .npy, .safetensors, .jsonl, .parquet"),
        (("MODEL", "DATA", "-o", "OUT.npy", "--dtype", "bit"), 2, "dtype 'bit' is not one of float32"),
        (("MODEL", "DATA", "-o", "OUT.npy", "--dims", "33"), 2, "dims 33 is more than the 32 numbers of a vector"),
        (("MODEL", "DATA", "-o", "OUT.npy", "--task", "masked-lm"), 2, "task masked-lm gives no vectors"),
        (("MODEL", "DATA", "-o", "OUT.npy", "--task", "embeding"), 2, "nearest: embedding"),
        (("MODEL", "DATA", "-o", "OUT.npy", "--prompt-name", "q"), 2, "prompt name 'q' is not one"),
        (("MODEL", "DATA", "-o", "OUT.npy", "--precision", "bf61"), 2, "bf61"),
        (("MODEL", "DATA", "-o", "OUT.npy", "--text-column", "nope"), 1, "no column 'nope'"),
        (("MODEL", "DATA", "-o", "nosuch/OUT.npy"), 1, "there is no such folder"),
        (("MODEL", "nosuch.csv", "-o", "OUT.npy"), 1, "cannot read nosuch.csv"),
        (("MODEL", "DATA", "-o", "OUT.npy", "--calibration", "DATA"), 2, "calibration is for dtype int8 and uint8"),
        (("./nosuch", "DATA", "-o", "OUT.npy"), 2, "unknown model './nosuch'"),
        (("MODEL", "DATA"), 2, "--output"),
    ],
)
def test_wrong_names_and_values_are_said(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    places = {"MODEL": str(folder / "model"), "DATA": str(tmp_path / "few.txt")}
    (tmp_path / "few.txt").write_text("great film\ndull\n")
    made = [places.get(a, a.replace("OUT", str(tmp_path / "out")) if a.startswith("OUT") else a) for a in arguments]
    done = run("encode", *made)
    assert done.code == code, done.err
    assert said in " ".join(done.err.split())
    assert "Traceback" not in done.err
    assert sorted(os.listdir(tmp_path)) == ["few.txt"]
