"""What a terminal shows while a verb is at work: at once, by stage, and nothing of it afterwards."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S

from vramfit.stages import heard, tell, within

TORCH = "TORCH IS IMPORTED"
ERASED = "\x1b[1A\x1b[2K"
"""How a line is taken back: the cursor goes up, and the line is cleared."""
LOG = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
VERBS = {
    "estimate": ["estimate", "bert-tiny"],
    "max-batch": ["max-batch", "bert-tiny", "--memory", "1GiB"],
    "plan": ["plan", "bert-tiny", "--memory", "1GiB"],
    "load": ["load", "bert-tiny", "--random-weights"],
    "train": ["train", "data.csv", "--model", "bert-tiny", "--output", "out"],
    "evaluate": ["evaluate", "bert-tiny", "data.csv"],
    "predict": ["predict", "bert-tiny", "data.csv"],
    "encode": ["encode", "bert-tiny", "data.csv", "--output", "vectors.npy"],
    "models": ["models", "bert-tiny"],
    "doctor": ["doctor"],
    "doctor MODEL": ["doctor", "bert-tiny"],
    "explain": ["explain", LOG, "--model", "bert-tiny", "--memory", "1GiB"],
    "sagemaker": ["sagemaker", "launch", "bert-tiny"],
    "watch": ["watch", "script.py"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data, a script, and a torch that says when it is imported, and is interrupted there as by Ctrl-C."""
    (tmp_path / "data.csv").write_text("text,label\nyes,a\nno,b\n")
    (tmp_path / "script.py").touch()
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "torch.py").write_text(f"import os\nos.write(2, b'{TORCH}\\n')\nraise KeyboardInterrupt\n")
    (stub / "transformers.py").write_text("import torch\n")
    return tmp_path


def run(folder: Path, arguments: list[str], *, on_terminal: bool) -> str:
    """What a command writes to stderr, up to its end."""
    ours, theirs = pty.openpty() if on_terminal else os.pipe()
    path = os.pathsep.join([str(folder / "stub"), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-m", "vramfit", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    try:
        while select.select([ours], [], [], LIMIT_S)[0] and (part := os.read(ours, 2**16)):
            written += part
    except OSError:  # how Linux says that the other side of a terminal is closed
        pass
    finally:
        os.close(ours)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert out == b""
    return written.decode()


@pytest.mark.parametrize("verb", VERBS)
def test_a_terminal_shows_what_goes_on_before_torch_is_imported(verb: str, folder: Path) -> None:
    before, imported, after = run(folder, VERBS[verb], on_terminal=True).partition(TORCH)
    assert imported
    assert "importing" in before
    assert ERASED in after
    left = after.rpartition(ERASED)[2]
    assert "…" not in left
    if verb != "watch":  # whose errors are Python's own
        assert left.strip().endswith("Interrupted.")


@pytest.mark.parametrize("verb", ["estimate", "train"])
def test_a_pipe_sees_nothing_of_it(verb: str, folder: Path) -> None:
    assert run(folder, VERBS[verb], on_terminal=False).splitlines()[:1] == [TORCH]


def test_stages_are_heard_as_parts_of_what_they_belong_to() -> None:
    stages: list[str] = []
    done = 0
    with heard(stages.append):
        tell("importing")
        with within(lambda: f"{done} done"):
            tell("tracing")
            done = 1
            tell("tracing")
        tell("replaying")
    tell("heard by nobody")
    assert stages == ["importing", "0 done, tracing", "1 done, tracing", "replaying"]
