"""Ctrl-C in verbs that have nothing to resume: one line, with what was written."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.waiting import LIMIT_S

from vramfit.cli import inference, main

INTERRUPTED = 130


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Also where whoever runs the tests has Ctrl-C ignored, as `nohup` has."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*_: Any, **__: Any) -> NoReturn:
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("the signal was lost")


def leave(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["vramfit", *arguments])
    monkeypatch.setattr(main, "hush", lambda *names: None)  # it is for a process of its own
    with pytest.raises(SystemExit) as left:
        main.main()
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.parametrize("verb", ["plan", "evaluate"])
def test_an_interrupt_is_said(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vramfit.planner.plan.plan", interrupt)
    monkeypatch.setattr("vramfit.runtime.trained.open_model", interrupt)
    (tmp_path / "data.csv").touch()
    arguments = ["bert-tiny", "--memory", "1GiB"] if verb == "plan" else ["bert-tiny", str(tmp_path / "data.csv")]
    assert leave(monkeypatch, verb, *arguments) == INTERRUPTED
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "Interrupted.\n")


def test_an_interrupted_predict_says_that_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vramfit.runtime.trained.open_model", interrupt)
    data, output = tmp_path / "data.csv", tmp_path / "out.jsonl"
    data.touch()
    assert leave(monkeypatch, "predict", "bert-tiny", str(data), "--output", str(output)) == INTERRUPTED
    said = f"Interrupted: nothing was written to {output}, which is written at the end.\n"
    assert capsys.readouterr().err == said
    assert not output.exists()


@pytest.mark.parametrize("named", [False, True])
def test_a_predict_that_is_interrupted_while_it_writes_says_how_far_it_came(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    rows = [{"row": number} for number in range(1, 6)]

    def dumps(row: dict[str, Any], **_: Any) -> str:
        return interrupt() if row == rows[3] else json.JSONEncoder().encode(row)

    monkeypatch.setattr(inference.json_format, "dumps", dumps)
    said = f"nothing was written to {output}" if named else "3 of 5 rows were written to stdout"
    with pytest.raises(KeyboardInterrupt, match=said):
        inference._write(rows, str(output) if named else None)
    assert len(capsys.readouterr().out.splitlines()) == (0 if named else 3)
    assert not output.exists()


@pytest.mark.parametrize("module", ["typer", "rich.console"])
def test_an_interrupt_while_the_command_line_is_imported_is_quiet(module: str) -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from vramfit.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "gpus"], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")
