"""`vramfit train`, `evaluate` and `predict` as a user runs them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import warm
from tests.integration.command import Done, vramfit
from tests.unit.runtime.training.small_runs import same_weights, write_classes, write_model
from tests.waiting import running, wait_until
from tests.warm import ENVIRONMENT, WarmProcess

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("train")
    write_model(made / "source")
    write_classes(made / "train.csv", num_rows=80)
    write_classes(made / "dev.csv", num_rows=20, seed=5)
    return made


def command(folder: Path, output: str, *more: str) -> list[str]:
    paths = ["--model", str(folder / "source"), "--output", str(folder / output)]
    settings = ["--device", "cpu", "--batch", "8", "--lr", "3e-3"]
    return ["train", str(folder / "train.csv"), *paths, "--eval-data", str(folder / "dev.csv"), *settings, *more]


def run(*arguments: str, stdin: str | None = None) -> Done:
    return vramfit(*arguments, stdin=stdin, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Done:
    return run(*command(folder, "out", "--epochs", "6", "--json"))


def test_train_saves_a_model_and_prints_its_record(folder: Path, trained: Done) -> None:
    assert trained.code == 0, trained.err
    record = json.loads(trained.out)
    assert record["status"] == "completed"
    assert record["num_steps"] == 60
    assert "Training: 60 steps, batch 8" in trained.err
    assert (folder / "out" / "model.safetensors").exists()
    kinds = [json.loads(line)["kind"] for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("train") == 60
    assert kinds.count("eval") == 6


def test_evaluate_gives_the_metrics_of_the_best_step(folder: Path, trained: Done) -> None:
    done = run("evaluate", str(folder / "out"), str(folder / "dev.csv"), "--json")
    assert done.code == 0, done.err
    record, result = json.loads(trained.out), json.loads(done.out)
    assert result["accuracy"] == record["best_value"]
    assert result["num_samples"] == 20


def test_evaluate_says_what_labels_that_are_numbers_stand_for(folder: Path, trained: Done) -> None:
    by_name = run("evaluate", str(folder / "out"), str(folder / "dev.csv"), "--json")
    text = (folder / "dev.csv").read_text()
    (folder / "numbers.csv").write_text(text.replace(",good", ",1").replace(",bad", ",0"))
    by_number = run("evaluate", str(folder / "out"), str(folder / "numbers.csv"), "--json")
    assert json.loads(by_name.out)["notes"] == []
    assert json.loads(by_number.out)["notes"] == ["labels are numbers: 0 is bad, 1 is good"]
    assert json.loads(by_number.out)["accuracy"] == json.loads(by_name.out)["accuracy"]
    shown = run("evaluate", str(folder / "out"), str(folder / "numbers.csv"))
    assert re.search(r"^note +labels are numbers: 0 is bad, 1 is good$", shown.out.replace(" \n", "\n"), re.MULTILINE)


def test_predictions_are_those_of_plain_transformers_in_the_order_of_the_input(folder: Path, trained: Done) -> None:
    texts = ["the film was fine", "music and film and the film was very dull", "", "great", "the awful film"]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    done = run("predict", str(folder / "out"), "-", stdin=rows)
    assert done.code == 0, done.err
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [row["row"] for row in found] == [1, 2, 3, 4, 5]
    assert "empty" in found[2]["error"]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    for text, row in zip(texts, found, strict=True):
        if not text:
            continue
        with torch.no_grad():
            probabilities = model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0]
        assert row["label"] == model.config.id2label[int(probabilities.argmax())]
        assert row["probability"] == pytest.approx(float(probabilities.max()), abs=1e-5)


def test_packed_predictions_are_the_padded_ones(folder: Path, trained: Done) -> None:
    padded, packed = (
        run("predict", str(folder / "out"), str(folder / "train.csv"), "--device", "cpu", "--attention", attention)
        for attention in ("sdpa", "packed")
    )
    assert padded.code == packed.code == 0, packed.err
    pairs = [tuple(map(json.loads, pair)) for pair in zip(*(d.out.splitlines() for d in (padded, packed)), strict=True)]
    assert [mine["row"] for mine, _ in pairs] == [its["row"] for _, its in pairs]
    assert all(abs(mine["probability"] - its["probability"]) < 1e-5 for mine, its in pairs)
    wrong = run("predict", str(folder / "out"), str(folder / "dev.csv"), "--attention", "pakced")
    assert (wrong.code, "nearest: packed" in wrong.err) == (2, True)


def test_rows_are_lines_and_indices_count_whatever_lines_rows_take(folder: Path, trained: Done) -> None:
    data = folder / "lines.csv"
    data.write_text('text\n"the film\nwas fine"\n \n"was\n\ndull"\na,b\ngreat\n')
    for more in ((), ("--attention", "packed")):
        done = run("predict", str(folder / "out"), str(data), "--device", "cpu", *more)
        assert done.code == 0, done.err
        found = [json.loads(line) for line in done.out.splitlines()]
        assert [(line["row"], line["index"]) for line in found] == [(2, 0), (4, 1), (5, 2), (8, 3), (9, 4)]
        assert ["error" in line for line in found] == [False, True, False, True, False]


def test_a_model_of_pairs_says_so_when_it_gets_single_texts(folder: Path, trained: Done, tmp_path: Path) -> None:
    model = shutil.copytree(folder / "out", tmp_path / "pairs")
    record = json.loads((model / "run.json").read_text())
    (model / "run.json").write_text(json.dumps(record | {"num_texts": 2}))
    predicted = run("predict", str(model), str(folder / "dev.csv"))
    evaluated = run("evaluate", str(model), str(folder / "dev.csv"), "--json")
    assert predicted.code == evaluated.code == 0, predicted.err + evaluated.err
    assert "learned from pairs of texts" in predicted.err
    assert "learned from pairs of texts" in json.loads(evaluated.out)["notes"][0]


def test_predictions_are_not_made_for_a_place_that_cannot_be_written(folder: Path, trained: Done) -> None:
    data = folder / "dev.csv"
    content = data.read_text()
    for output, said in ((folder, "is a folder"), (folder / "no" / "p.jsonl", "no such folder"), (data, "overwrite")):
        done = run("predict", str(folder / "out"), str(data), "--output", str(output))
        assert done.code == 1
        assert said in done.err
    assert data.read_text() == content


def test_predict_chooses_a_batch_for_an_emulated_gpu(folder: Path, trained: Done) -> None:
    place = ("--device", "emulated", "--memory", "64MiB")
    done = run("predict", str(folder / "out"), str(folder / "dev.csv"), *place)
    assert done.code == 0, done.err
    assert [json.loads(line)["row"] for line in done.out.splitlines()] == list(range(2, 22))


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_model_without_a_head_for_the_task_is_refused_before_labels_are_compared(
    folder: Path, trained: Done, verb: str
) -> None:
    for model, task in (("out", "token-classification"), ("source", "sequence-classification")):
        done = run(verb, str(folder / model), str(folder / "dev.csv"), "--task", task)
        assert (done.code, done.out) == (1, "")
        assert f"has no trained head for {task}" in done.err


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(folder: Path, trained: Done) -> None:
    arguments = command(folder, "stopped", "--epochs", "6")
    program = [sys.executable, "-m", "vramfit", *arguments]
    journal = folder / "stopped" / "metrics.jsonl"
    with running(program, start=WarmProcess, stderr=subprocess.PIPE) as process:
        wait_until(lambda: journal.exists() and journal.stat().st_size > 200, "a step is journalled", child=process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130, err
    assert "its checkpoint is saved" in err
    assert "go on with: vramfit train" in err
    assert err.rstrip().endswith("--resume")
    done = run(*arguments, "--resume")
    assert done.code == 0, done.err
    assert "Going on after step" in done.err
    assert same_weights(folder / "out", folder / "stopped")


def early(folder: Path, data: Path) -> list[str]:
    """A run on an emulated GPU."""
    paths = ["--model", str(folder / "source"), "--output", str(folder / "early")]
    return ["train", str(data), *paths, "--device", "emulated", "--memory", "64MiB", "--batch", "8", "--epochs", "1"]


def importing(process: Any, pipe: Path) -> None:
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text(), "torch is being imported", child=process)


def write_end(process: Any, pipe: Path) -> TextIO:
    """Of a pipe, once the process reads from it."""

    def opened() -> int | None:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            return None

    number = wait_until(opened, f"{pipe.name} is read", child=process)
    os.set_blocking(number, True)
    return os.fdopen(number, "w")


def reading_data(process: Any, pipe: Path) -> None:
    with write_end(process, pipe) as file:
        file.write("text,label\n")
        file.flush()
        process.send_signal(signal.SIGINT)
        process.wait()


def planning(process: Any, pipe: Path) -> None:
    with write_end(process, pipe) as file:
        file.write((pipe.parent / "train.csv").read_text())
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Planning")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("moment", "start"), [(importing, subprocess.Popen), (reading_data, WarmProcess), (planning, WarmProcess)]
)
def test_ctrl_c_before_the_first_step_ends_at_once_and_says_so(
    folder: Path, moment: Callable[[Any, Path], None], start: Any
) -> None:
    pipe = folder / "pipe.csv"
    os.mkfifo(pipe)
    program = [sys.executable, "-m", "vramfit", *early(folder, pipe)]
    with running(program, start=start, env=ENVIRONMENT, stderr=subprocess.PIPE) as process:
        moment(process, pipe)
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    pipe.unlink()
    assert process.returncode == 130, err
    assert err == "Interrupted before the first step: nothing was trained yet.\n"
    done = run(*early(folder, folder / "train.csv"), "--resume")
    assert done.code == 0, done.err
    shutil.rmtree(folder / "early")


def test_wrong_requests_are_two_lines_and_code_two(folder: Path) -> None:
    done = run(*command(folder, "never", "--schedule", "linar", "--patience", "0"))
    assert done.code == 2
    assert "schedule 'linar'" in done.err
    assert "patience 0" in done.err
    assert not (folder / "never").exists()


def test_what_does_not_fit_is_code_three(folder: Path) -> None:
    paths = ["--model", str(folder / "source"), "--output", str(folder / "small")]
    done = run("train", str(folder / "train.csv"), *paths, "--device", "emulated", "--memory", "1MiB")
    assert done.code == 3, done.err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_at_random_moments_change_nothing() -> None:
    script = [str(ROOT / "scripts" / "kill_and_resume.py"), "--count", "5", "--steps", "40", "--fork"]
    rounds = ["--train=", "--train=--offload optimizer --precision bf16", "--train=--offload weights"]
    done = warm.run([sys.executable, *script, *rounds])
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"(\d+) kills in \d+ runs; (\d+) wrong", done.stdout)
    assert found == [("5", "0")] * len(rounds), done.stdout
