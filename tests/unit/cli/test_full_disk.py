"""A full disk is said with what could not be written; it is no bug of vramfit's."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import running
from tests.warm import WarmProcess

from vramfit.cli import inference
from vramfit.cli import main as cli
from vramfit.errors import VramfitError
from vramfit.monitor.outlets import JsonLines

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
ROWS = [{"row": number, "label": "good"} for number in range(20_000)]


def full(*_: Any, **__: Any) -> None:
    raise FULL


def test_predictions_on_a_full_disk_leave_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        VramfitError, match=r"cannot write .*out.jsonl: No space left on device \(.* to write, "
    ) as caught:
        inference._write(ROWS, str(output))
    assert "make room" in str(caught.value.hint)
    assert output.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.jsonl"]


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("arguments", [("gpus",), ("gpus", "--json"), ("models", "bert-tiny", "--json")])
def test_standard_output_that_is_full_is_named(arguments: tuple[str, ...], unbuffered: bool) -> None:
    command = [sys.executable, "-m", "vramfit", *arguments]
    how = (
        {"start": subprocess.Popen, "env": {**os.environ, "PYTHONUNBUFFERED": "1"}}
        if unbuffered
        else {"start": WarmProcess}
    )
    with (
        Path("/dev/full").open("w") as device,
        running(command, **how, stdout=device, stderr=subprocess.PIPE) as process,
    ):
        _, said = process.communicate()
    assert process.returncode == 1
    assert "Error: cannot write standard output: No space left on device" in said
    assert "bug" not in said
    assert len(said.splitlines()) == 2


def test_a_file_nobody_named_is_no_bug_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vramfit.cli.catalogue.print_json", full)
    monkeypatch.setattr(sys, "argv", ["vramfit", "gpus", "--json"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "bug" not in said


def test_samples_that_cannot_be_written_name_their_file() -> None:
    lines = JsonLines("/dev/full")
    lines.open()
    with pytest.raises(VramfitError, match="cannot write /dev/full: No space left on device"):
        lines.event("sample", {"step": 1})
