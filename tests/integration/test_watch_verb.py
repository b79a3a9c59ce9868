"""`vramfit watch` as a user runs it: the command stays what it is, and what is seen is said."""

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.command import vramfit
from tests.waiting import running
from vramfit.records.codec import from_data
from vramfit.records.watch import WatchRecord

SCRIPT = """
import sys
import torch
import vramfit
from torch import nn

print("arguments", sys.argv[1:], __name__, flush=True)
with vramfit.EmulatedGPU(memory="64MiB"):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for step in range(8):
        hidden = model[0](torch.randn(256, 256))
        model(torch.randn(256, 256)).sum().backward()
        optimizer.step()
        kept.append(hidden.detach() * 2)
    if "grow" in sys.argv:
        model(torch.randn(1 << 17, 256))
if "fail" in sys.argv:
    raise ValueError("an error of its own")
if "exit" in sys.argv:
    sys.exit(7)
"""
KEPT_LINE = 1 + SCRIPT.split("kept.append")[0].count("\n")


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def test_a_script_runs_as_it_would_and_the_leak_is_named(script: str, tmp_path: Path) -> None:
    lines = tmp_path / "watch.jsonl"
    done = vramfit("watch", "--detailed", "--jsonl", str(lines), script, "--debug", "--json")
    assert done.code == 0, done.err
    assert done.out == "arguments ['--debug', '--json'] __main__\n"
    for part in (
        f"train.py:{KEPT_LINE}",
        "`kept` holds",
        "emulated of 64.00\N{NO-BREAK SPACE}MiB",
        "backward",
        "freed its cache to make room never",
    ):
        assert part in done.err, part
    assert json.loads(lines.read_text().splitlines()[-1])["num_steps"] == 8


def test_errors_exit_codes_and_arguments_stay_the_scripts_own(script: str) -> None:
    failed = vramfit("watch", "--no-live", sys.executable, "-u", script, "fail")
    assert failed.code == 1
    assert failed.err.rstrip().endswith("ValueError: an error of its own")
    assert "watched.py" not in failed.err
    assert vramfit("watch", script, "exit").code == 7


def test_memory_that_runs_out_is_reported_before_the_error(script: str) -> None:
    done = vramfit("watch", "--detailed", script, "grow")
    assert done.code == 1
    report, error = done.err.index("vramfit: out of memory in"), done.err.index("Traceback (most recent call last)")
    assert report < error
    assert "alive then:" in done.err[report:error]
    assert done.err.rstrip().splitlines()[-1].startswith("torch.OutOfMemoryError: CUDA out of memory")


def test_json_is_the_record_and_nothing_else(script: str) -> None:
    done = vramfit("watch", "--json", script)
    record = from_data(WatchRecord, json.loads(done.out))
    assert "arguments []" in done.err
    assert (record.device, record.num_steps) == ("emulated", 8)


def test_modules_and_code_run_too() -> None:
    module = vramfit("watch", "-m", "platform")
    assert (module.code, module.out) == (0, f"{platform.platform()}\n")
    done = vramfit("watch", "python", "-c", "import sys; print(sys.argv); sys.exit(3)", "x")
    assert (done.code, done.out) == (3, "['-c', 'x']\n")


def heed_ctrl_c() -> None:
    """Whatever runs in the background of a shell ignores it, and hands that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_the_script_as_it_would(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(
        "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(600)\nfinally:\n    print('cleaned up')\n"
    )
    command = [sys.executable, "-m", "vramfit", "watch", str(tmp_path / "wait.py")]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running(command, **streams, env={**os.environ, "NO_COLOR": "1"}, preexec_fn=heed_ctrl_c) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate()
    assert child.returncode == -signal.SIGINT
    assert out == "cleaned up\n"
    assert "KeyboardInterrupt" in err
    assert "vramfit watch" in err


def test_a_command_that_is_no_python_keeps_its_code_and_its_signal() -> None:
    done = vramfit("watch", "bash", "-c", "echo hello; exit 5")
    assert (done.code, done.out) == (5, "hello\n")
    assert "not a Python script" in done.err
    assert vramfit("watch", "bash", "-c", "kill -TERM $$").code == 128 + signal.SIGTERM


def test_ctrl_c_reaches_a_command_that_is_no_python() -> None:
    script = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.1; done"
    command = [sys.executable, "-m", "vramfit", "watch", "bash", "-c", script]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with running(command, **streams, start_new_session=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does
        out, _ = child.communicate()
    assert (out, child.returncode) == ("caught\n", 9)


def test_what_cannot_be_watched_is_said_in_two_lines(tmp_path: Path) -> None:
    for arguments, code, words in (
        (("nosuch.py",), 1, "there is no script nosuch.py"),
        (("nosuchcommand",), 1, "neither a script nor a command"),
        (("99999999",), 1, "there is no process 99999999"),
        (("python",), 1, "no script to watch"),
        ((), 2, "COMMAND"),
        (("--interval", "0", "x.py"), 2, "interval"),
        (("--detailed", "1"), 2, "NVML's view"),
        (("--jsonl", "x.jsonl", "bash", "-c", "true"), 2, "NVML's view"),
        (("--jsonl", str(tmp_path / "no" / "x.jsonl"), "-c", "print(1)"), 1, "cannot write"),
    ):
        done = vramfit("watch", *arguments)
        assert done.code == code, (arguments, done.err)
        assert words in done.err
        assert "Traceback" not in done.err


def test_a_script_that_cannot_start_is_told_of_without_frames_of_ours(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import (\n")
    for arguments, words in (((str(tmp_path / "broken.py"),), "SyntaxError"), (("-m", "nosuchmodule"), "ImportError")):
        done = vramfit("watch", *arguments)
        assert (done.code, done.err.splitlines()[-1].partition(":")[0]) == (1, words)
        assert "watched.py" not in done.err


def test_a_process_without_a_driver_is_told_kindly() -> None:
    from vramfit.devices.probe import probe

    with running([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        done = vramfit("watch", str(idle.pid))
    if probe():
        assert done.code == 0
        assert "NVML's view only" in done.err
    else:
        assert done.code == 1
        assert "no NVIDIA driver" in done.err
        assert "vramfit doctor" in done.err


def test_a_script_without_a_gpu_says_what_is_missing() -> None:
    done = vramfit("watch", "-c", "import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))")
    assert done.code == 0
    assert "No GPU is in use" in done.err
