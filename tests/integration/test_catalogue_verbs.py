import json
import subprocess
import sys

import pytest

from tests.integration.command import vramfit
from tests.waiting import running
from tests.warm import WarmProcess
from vramfit.estimator.predict import estimate


def test_gpus_json_is_an_array_of_at_least_forty_objects() -> None:
    done = vramfit("gpus", "--json")
    gpus = json.loads(done.out)
    assert done.code == 0
    assert len(gpus) >= 40
    assert all(gpu["total_memory_bytes"] > 0 and gpu["sources"] for gpu in gpus)


def test_models_json_is_an_array_of_at_least_twenty_five_objects() -> None:
    models = json.loads(vramfit("models", "--json").out)
    listed = vramfit("models").out.splitlines()
    for title, name in (("Embedding models", "bge-m3"), ("Rerankers", "ms-marco-minilm-l6-v2")):
        group = listed[listed.index(title) :]
        assert any(line.startswith(f"{name} ") for line in group[: group.index("")])
    assert len(models) >= 25
    assert all(model["num_parameters"] > 0 for model in models)


def test_doctor_json_is_an_array_of_findings() -> None:
    done = vramfit("doctor", "--json")
    findings = json.loads(done.out)
    assert {"check", "severity", "what", "why", "fix"} <= set(findings[0])
    assert done.code == (1 if any(f["severity"] == "error" for f in findings) else 0)


def test_one_model_is_shown_the_way_a_person_checks_it() -> None:
    out = vramfit("models", "bert-base-uncased").out
    for fact in ("12 × 64", "30,522", "109,482,240", "417.64 MiB", "512", "saved with"):
        assert fact in out, fact


def test_one_model_as_json_has_its_parameters_by_part() -> None:
    (card,) = json.loads(vramfit("models", "google-bert/bert-large-uncased", "--task", "masked-lm", "--json").out)
    assert sum(card["parts"].values()) == card["num_parameters"]
    assert card["model_class"] == "BertForMaskedLM"


def test_one_gpu_is_shown_with_its_sources_and_instances() -> None:
    out = vramfit("gpus", "K80").out
    assert "11.17 GiB" in out
    assert "≤ 550 MiB  (bounded)" in out
    assert "ml.p2.xlarge" in out
    assert "data sheet" in out


@pytest.mark.parametrize(
    ("arguments", "near"),
    [(("gpus", "rtx-4091"), "rtx-4090"), (("models", "bert-base-uncasd"), "bert-base-uncased")],
)
def test_an_unknown_name_is_one_line_with_three_nearest_and_exit_two(arguments: tuple[str, ...], near: str) -> None:
    done = vramfit(*arguments)
    first, hint = done.err.splitlines()
    assert done.code == 2
    assert near in first
    assert first.count(", ") >= 2
    assert hint.strip().startswith("→")
    assert done.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("gpus", "--nonsense"),
        ("gpus", "a", "b"),
        ("models", "bert-base-uncased", "--task", "poetry"),
    ],
)
def test_a_wrong_command_line_is_usage_and_no_traceback(arguments: tuple[str, ...]) -> None:
    done = vramfit(*arguments)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert done.err.startswith("Error: ")


def test_a_folder_that_is_no_model_is_one_clear_error(tmp_path: object) -> None:
    done = vramfit("models", str(tmp_path))
    assert done.code == 1
    assert "config.json" in done.err
    assert "Traceback" not in done.err


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    assert "Traceback" in vramfit("gpus", "nothing-like-it", "--debug").err


def test_every_verb_has_help_with_an_example() -> None:
    for verb in ("gpus", "models", "doctor"):
        done = vramfit(verb, "--help")
        assert done.code == 0
        assert f"Example: vramfit {verb}" in done.out


def test_a_reader_that_leaves_early_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m vramfit gpus --json | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [("gpus",), ("gpus", "--json"), ("estimate", "bert-tiny")])
def test_a_reader_that_has_gone_is_what_shells_call_it(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "vramfit", *arguments]
    with running(command, start=WarmProcess, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait() == 141


def test_the_lock_of_this_environment_is_written(tmp_path: object) -> None:
    path = f"{tmp_path}/environment.yml"
    done = vramfit("doctor", "--lock", path)
    assert "Wrote" in done.err
    with open(path) as file:
        assert "- pip:" in file.read()


@pytest.mark.parametrize("columns", ["110", "60", "24"])
def test_labels_of_a_model_are_never_cut(columns: str) -> None:
    out = vramfit("models", "bert-base-uncased", COLUMNS=columns).out
    assert "…" not in out
    for label in ("hidden size", "feed-forward", "vocabulary", "saved with", "embeddings", "encoder.layer"):
        assert f"\n{label}  " in out
    assert "question-answering" in out or columns == "24"


@pytest.mark.parametrize("name", ["bert-base-uncased", "albert-base-v2", "modernbert-base"])
def test_int8_is_what_an_estimate_says(name: str) -> None:
    pytest.importorskip("torchao", reason='quantization: pip install "vramfit[train]"')
    (card,) = json.loads(vramfit("models", name, "--json").out)
    e = estimate(name, task="features", mode="infer", batch=1, seq=8, quantize="int8")
    inputs = 3 * 512
    difference = e.phases["load"].peak_requested_bytes - card["buffer_bytes"] - card["weight_bytes"]["int8"]
    assert 0 <= difference <= inputs


@pytest.mark.parametrize("verb", [(), ("estimate",), ("train",)])
def test_a_flag_shows_no_value_to_give(verb: tuple[str, ...]) -> None:
    done = vramfit(*verb, "--help")
    assert "--help" in done.out
    assert "<bool>" not in done.out


@pytest.mark.parametrize(("verb", "last"), [("gpus", "bf16"), ("models", "parameters")])
def test_a_list_fits_a_terminal_of_eighty_columns(verb: str, last: str) -> None:
    lines = vramfit(verb, COLUMNS="80").out.splitlines()
    assert lines[0].endswith(last)
    assert len(lines) > 25
    assert max(map(len, lines)) <= 80
