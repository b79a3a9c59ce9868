"""Training jobs as SageMaker runs them: its toolkit's own `train` command over an /opt/ml tree, and a container's way.

Scripts of the user's run in interpreters that begin with nothing; what calls the entry point as a module is forked.
The toolkit is in the environment after `pip install sagemaker-training`; `VRAMFIT_SAGEMAKER_TRAIN` names the command
where it is elsewhere.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from tests import warm
from tests.unit.integrations.sagemaker.job_folders import write_job
from tests.unit.runtime.training.small_runs import same_weights
from tests.waiting import LIMIT_S, running
from tests.warm import ENVIRONMENT, WarmProcess
from vramfit.integrations.sagemaker.entry import METRIC_DEFINITIONS
from vramfit.integrations.sagemaker.job import make_request, read_job
from vramfit.runtime.training.train import train

ROOT = Path(__file__).parents[2]
SCRIPT = "from vramfit.integrations.sagemaker import main\n\nmain()\n"
MODULE = {"SAGEMAKER_TRAINING_MODULE": "vramfit.integrations.sagemaker:main"}


def toolkit() -> str:
    """The toolkit's command."""
    found = Path(os.environ.get("VRAMFIT_SAGEMAKER_TRAIN") or Path(sys.executable).with_name("train"))
    if not found.exists():
        pytest.skip("the training toolkit of SageMaker: pip install sagemaker-training==5.1.4")
    return str(found)


def environment(base: Path, **more: str) -> dict[str, str]:
    """Of a job; threads are one, as in the test's own process, so that sums come out the same."""
    clean = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("SM_")}
    return {**clean, "SAGEMAKER_BASE_DIR": str(base), "SM_STUDIO_LOCAL_MODE": "true", **more}


def script_mode(base: Path) -> Path:
    """The job with a script of the user's, as SageMaker's SDK sends it."""
    (base / "code").mkdir()
    (base / "code" / "train.py").write_text(SCRIPT)
    path = base / "input/config/hyperparameters.json"
    data = json.loads(path.read_text()) | {"sagemaker_program": "train.py", "sagemaker_submit_directory": "/nowhere"}
    data["sagemaker_submit_directory"] = str(base / "code")
    path.write_text(json.dumps({name: json.dumps(value) for name, value in data.items()}))
    return base


def run_script(base: Path) -> "subprocess.CompletedProcess[str]":
    """The toolkit over a job with a script."""
    source = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = environment(base, PYTHONPATH=source)
    return subprocess.run([toolkit()], env=env, capture_output=True, text=True, timeout=LIMIT_S, cwd=base)


def run_forked(arguments: list[str], base: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    with contextlib.chdir(base):
        return warm.run([sys.executable, *arguments], env=environment(base, **more))


def caught(name: str, log: str) -> list[float]:
    """What SageMaker would draw for a metric."""
    pattern = next(d["Regex"] for d in METRIC_DEFINITIONS if d["Name"] == name)
    return [float(found) for found in re.findall(pattern, log)]


def check_success(base: Path, log: str) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(base / "model")
    assert model.config.num_labels == 2
    assert json.loads((base / "output/data/run.json").read_text())["status"] == "completed"
    assert not (base / "output/failure").exists()
    left = {path.name for path in (base / "model").iterdir()}
    assert left == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    losses = caught("train:loss", log)
    assert losses
    assert all(0 < loss < 10 for loss in losses)
    assert len(caught("eval:accuracy", log)) == 2
    assert len(caught("eval:loss", log)) == 2


def test_a_script_of_two_lines_trains_under_the_toolkit(tmp_path: Path) -> None:
    assert f"```py\n{SCRIPT}```" in (ROOT / "docs" / "sagemaker.md").read_text(encoding="utf-8")
    base = script_mode(write_job(tmp_path / "opt/ml", skip_bad_rows="True"))
    done = run_script(base)
    assert done.returncode == 0, done.stdout + done.stderr
    check_success(base, done.stdout)


def test_the_same_entry_point_trains_as_a_container_and_says_what_memory_it_took(tmp_path: Path) -> None:
    base = write_job(tmp_path / "ml", device="emulated", memory="120MiB")
    done = run_forked(["-m", "vramfit.integrations.sagemaker", "train"], base)
    assert done.returncode == 0, done.stdout + done.stderr
    check_success(base, done.stdout)
    assert all(0 < taken <= 120 * 2**20 for taken in caught("train:reserved_bytes", done.stdout))
    assert caught("train:num_recoveries", done.stdout)[-1] == 0


def test_memory_that_is_too_small_names_the_instance_that_would_do(tmp_path: Path) -> None:
    base = script_mode(write_job(tmp_path / "ml", device="emulated", memory="8MiB"))
    done = run_script(base)
    reason = (base / "output/failure").read_text()
    assert done.returncode == 1
    assert "\n" not in reason
    assert len(reason) <= 1024
    assert re.search(r"ml\.g\d\w*\.\w+ would do: .*iB of .*iB \(", reason), reason
    assert not list((base / "model").iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epocs": "3"}, "hyperparameter epocs is not known (nearest: epochs)"),
        ({"channels": False}, "there is no channel 'train'"),
    ],
)
def test_what_is_wrong_with_a_job_is_one_sentence(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    base = write_job(tmp_path / "ml", **changes)
    done = run_forked([toolkit()], base, **MODULE)
    assert done.returncode == 1
    assert words in (base / "output/failure").read_text()
    assert "\n" not in (base / "output/failure").read_text()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]"])
def test_a_configuration_that_cannot_be_read_is_one_sentence_too(tmp_path: Path, content: bytes) -> None:
    base = tmp_path / "ml"
    (base / "input/config").mkdir(parents=True)
    (base / "input/config/hyperparameters.json").write_bytes(content)
    done = run_forked(["-m", "vramfit.integrations.sagemaker", "train"], base)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    reason = (base / "output/failure").read_text()
    assert "hyperparameters.json is not" in reason
    assert "\n" not in reason


def test_after_sigterm_the_next_job_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    whole = write_job(tmp_path / "whole", epochs="10")
    train(make_request(read_job(None, {"SAGEMAKER_BASE_DIR": str(whole)})))
    base = write_job(tmp_path / "ml", epochs="10")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    toolkits = [sys.executable, toolkit()]
    with running(toolkits, start=WarmProcess, env=environment(base, **MODULE), **streams) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "[metrics] step=" in line and "eval_" not in line:
                break
        process.send_signal(signal.SIGTERM)
        log = process.stdout.read()
        assert process.wait() == 143, log
    assert "its checkpoint is saved" in log
    assert not (base / "output/failure").exists()
    assert not list((base / "model").iterdir())
    again = run_forked([toolkit()], base, **MODULE)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Going on after step" in again.stdout
    assert same_weights(whole / "checkpoints" / "run", base / "model")
