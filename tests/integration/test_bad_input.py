"""Jobs that cannot be: one clear line and what to do, never a traceback."""

import json
from pathlib import Path

import pytest

from tests.integration.command import Done, vramfit

SMALL = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 128,
}


def assert_one_line(done: Done, code: int, said: str) -> None:
    assert done.code == code
    assert said in done.err
    assert done.err.startswith("Error: ")
    lines = done.err.splitlines()
    assert len(lines) <= 2
    assert all(line.startswith("  → ") for line in lines[1:])
    assert "Traceback" not in done.err + done.out
    assert "unexpected" not in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bert-tiny", "--seq", "513"), "seq 513 is beyond the 512 positions of bert-tiny"),
        (("deberta-v3-xsmall", "--attention", "sdpa"), "deberta-v3-xsmall has no attention sdpa (it has eager)"),
        (("bert-tiny", "--attention", "flash"), "attention 'flash' is not one of sdpa, eager, packed"),
        (("bert-tiny", "--optimizer", "lion"), "optimizer 'lion' is not one of adamw"),
        (("bert-tiny", "--task", "translation"), "task 'translation' is not one of"),
        (("bert-tiny", "--freeze", "roberta.*"), "freeze 'roberta.*' matches no parameter"),
        (("bert-tiny", "--precision", "fp16"), "precision fp16 cannot train"),
        (("bert-tiny", "--batch", "9", "--accumulate", "2"), "does not divide"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_job_that_its_model_or_gpu_cannot_do_is_one_line_and_exit_two(arguments: tuple[str, ...], said: str) -> None:
    assert_one_line(vramfit("estimate", *arguments), 2, said)


def test_a_folder_without_a_configuration_is_one_line_and_exit_one(tmp_path: Path) -> None:
    assert_one_line(vramfit("estimate", str(tmp_path)), 1, "has no config.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "config.json"), (json.dumps(SMALL | {"num_attention_heads": 7}), "cannot be built")],
    ids=["cut short", "heads that do not divide"],
)
def test_a_damaged_configuration_is_one_line_and_exit_one(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert_one_line(vramfit("estimate", str(tmp_path)), 1, said)


def test_a_snapshot_that_cannot_be_written_says_so_after_the_answer(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "step.pickle"
    done = vramfit("estimate", "bert-tiny", "--seq", "16", "--no-advice", "--snapshot", str(file))
    assert done.code == 1
    assert "cannot write" in done.err
    assert "Traceback" not in done.err
