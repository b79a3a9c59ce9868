"""`main`: a training job from beginning to end: read, train, leave the model, or leave the reason.

With several GPUs or hosts it starts torchrun, and watches over that.
"""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from vramfit.devices.catalogue import find_instance
from vramfit.errors import NoPlanFits, RecoveryExhausted, UnknownGPU, VramfitError
from vramfit.integrations.sagemaker.job import Job, make_request, output_folder, read_arguments, read_job
from vramfit.records.plan import InstanceFit
from vramfit.report.run import metrics_in_words
from vramfit.runtime.training import events
from vramfit.runtime.training.events import Interrupted, Terminated, stop_request
from vramfit.runtime.training.request import DEFAULT_BATCH, OPTIONS, TrainRequest
from vramfit.settings.values import Switch
from vramfit.units import counted, format_bytes

MAX_CHARACTERS = 1024
"""SageMaker shows no more."""


def reason_of(error: BaseException, job: Job | None, request: TrainRequest | None) -> str:
    """Why a job failed, in one line that SageMaker shows."""
    if not isinstance(error, VramfitError):
        return _one_line(f"unexpected {type(error).__name__}: {error} (a bug in vramfit; the log has the traceback)")
    hint = (error.hint or "").replace("--output", "checkpoint_s3_uri")
    if isinstance(error, NoPlanFits | RecoveryExhausted) and request is not None:
        fit = _larger_instance(error, job, request)
        if fit is not None and fit.safe_reserved_bytes is not None:
            hint = (
                f"{fit.instance} would do: {format_bytes(fit.safe_reserved_bytes)} of {format_bytes(fit.budget_bytes)} "
                f"({fit.gpu}, {fit.settings}); or {hint}"
            )
    return _one_line(f"{error}; {hint}" if hint else str(error))


def _larger_instance(error: VramfitError, job: Job | None, request: TrainRequest) -> InstanceFit | None:
    """The smallest instance whose GPU is larger than this one's, and on which the job has a plan."""
    from vramfit.planner.elsewhere import smallest_instance

    best: Any = getattr(error, "best", None)
    settings = {name: value for name, value in request.settings().items() if name not in ("micro_batch", "host_memory")}
    if best is not None:
        settings["seq"] = best.workload.seq
        if best.workload.num_labels is not None:
            settings["num_labels"] = best.workload.num_labels
    try:
        here = find_instance(job.instance).gpu if job is not None and job.instance else None
    except UnknownGPU:
        here = None
    try:
        return smallest_instance(
            request.model, larger_than=here, batch=request.batch or DEFAULT_BATCH, allow=request.allow, **settings
        )
    except VramfitError:
        return None


def write_failure(folder: Path, reason: str) -> None:
    """Leave the sentence where SageMaker looks for it; a folder that cannot be written is only said."""
    file = folder / "failure"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(reason, encoding="utf-8")
    except OSError as error:
        print(f"cannot write {file}: {error.strerror}", flush=True)


def _one_line(text: str) -> str:
    made = " ".join(text.split())
    return made if len(made) <= MAX_CHARACTERS else f"{made[: MAX_CHARACTERS - 1]}…"


EVERY_S = 1.0
"""Seconds between two lines of figures, at least; the first and the last step always have one."""
MARK = "[metrics]"
_NUMBER = r"([-+0-9.eE]+)"
_TRAINING = ("loss", "lr", "tokens_per_s", "reserved_bytes", "num_recoveries")
_EVALUATION = ("loss", "accuracy", "f1", "exact_match", "perplexity")

METRIC_DEFINITIONS: list[dict[str, str]] = [
    *({"Name": f"train:{name}", "Regex": rf"\[metrics\].* {name}={_NUMBER}"} for name in _TRAINING),
    *({"Name": f"eval:{name}", "Regex": rf"\[metrics\].* eval_{name}={_NUMBER}"} for name in _EVALUATION),
]
"""What to give SageMaker as metric definitions; `vramfit sagemaker launch` does."""


class MetricLines:
    """Writes what a run tells, a line each."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        self._last_s = -math.inf

    def show(self, event: events.Event) -> None:
        """One event."""
        if isinstance(event, events.Note):
            self._say(event.text)
        elif isinstance(event, events.Started):
            begin = f"Going on after step {event.step:,}" if event.step else "Training"
            self._say(f"{begin}: {counted(event.num_steps, 'step')}, {event.settings}.")
        elif isinstance(event, events.Stepped):
            now = time.monotonic()
            if now - self._last_s >= EVERY_S or event.step >= event.num_steps:
                self._last_s = now
                self._figures({"step": event.step} | {name: getattr(event, name) for name in _TRAINING})
        elif isinstance(event, events.Evaluated):
            numbers: dict[str, float | int | None] = {"step": event.result.step}
            numbers |= {f"eval_{k}": v for k, v in event.result.metrics.items() if isinstance(v, int | float)}
            self._figures(numbers)
            self._say(f"Step {event.result.step:,}: {metrics_in_words(event.result.metrics)}")
        elif isinstance(event, events.Saved):
            self._say(f"Saved step {event.step:,}.")

    def _figures(self, numbers: dict[str, float | int | None]) -> None:
        known = {name: value for name, value in numbers.items() if value is not None}
        words = [
            f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in known.items()
        ]
        self._say(" ".join([MARK, *words]))

    def _say(self, text: str) -> None:
        print(text, file=self._file, flush=True)


PORT = 29_500
WHAT, HINT = "Error: ", "  → "
"""How `vramfit train` says what went wrong, and what to do."""
DOES_NOT_FIT = re.compile(rf"exitcode\s*:\s*{NoPlanFits.exit_code}\b")
"""How torchrun tells the exit code of a process."""


def needs_torchrun(job: Job, request: TrainRequest, env: Mapping[str, str] = os.environ) -> bool:
    """Whether there is more than one GPU to run on, and nobody has started a process for each."""
    return request.device is None and max(job.num_gpus, 1) * len(job.hosts) > 1 and "RANK" not in env


def torchrun_command(job: Job, request: TrainRequest) -> list[str]:
    """What runs on every host: a process for each GPU, all of them together."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={max(job.num_gpus, 1)}"]
    if len(job.hosts) > 1:
        command += [
            f"--nnodes={len(job.hosts)}",
            f"--node-rank={job.hosts.index(job.current_host)}",
            f"--master-addr={job.hosts[0]}",
            f"--master-port={PORT}",
        ]
    else:
        command.append("--standalone")
    return [*command, "-m", "vramfit", "train", *train_arguments(request)]


def train_arguments(request: TrainRequest) -> list[str]:
    """The arguments with which `vramfit train` is asked for the same."""
    made = [request.data]
    for field in fields(TrainRequest):
        value: Any = getattr(request, field.name)
        option = OPTIONS[field.name]
        name = f"--{(option.option or field.name).replace('_', '-')}"
        if field.name == "max_grad_norm" and value is None:
            made += [name, "0"]
        elif field.name == "data" or value is None or value == field.default or value == ():
            continue
        elif isinstance(option.value, Switch):
            is_there = option.default is not True if value else option.default is True or option.is_planned
            made += [name if value else f"--no-{name[2:]}"] if is_there else []
        else:
            made += [name, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return made


def run_command(command: list[str]) -> None:
    """Run to the end; SIGTERM is passed on, and what the processes said last is the error.

    Raises:
        Terminated: SIGTERM came, and they have ended.
        VramfitError: they failed.
    """
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    reader = threading.Thread(target=_repeat, args=(process, said), daemon=True)
    reader.start()
    came: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        came.append(number)
        process.send_signal(number)

    usual: Any = signal.signal(signal.SIGTERM, pass_on)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, usual)
    reader.join(5)
    if came:
        raise Terminated("Terminated; the next job continues from the newest checkpoint")
    if code:
        what = next((line for line in said if line.startswith(WHAT)), f"torchrun ended with {code}")
        hint = next((line for line in said if line.startswith(HINT)), None)
        kind = NoPlanFits if any(DOES_NOT_FIT.search(line) for line in said) else VramfitError
        raise kind(what.removeprefix(WHAT), hint=hint.removeprefix(HINT) if hint else None)


def _repeat(process: "subprocess.Popen[str]", said: list[str]) -> None:
    """Pass errors on as they come, and keep what may explain them."""
    assert process.stderr is not None
    for line in process.stderr:
        sys.stderr.write(line)
        sys.stderr.flush()
        if line.startswith((WHAT, HINT)) or DOES_NOT_FIT.search(line):
            said.append(line.rstrip("\n"))


STOPPED = (130, 143)
"""Exit codes after Ctrl-C and SIGTERM."""
NOT_THE_MODEL = ("checkpoints",)
RECORDS = ("run.json", "plan.json", "step.json", "metrics.jsonl", "tensorboard")
_TOOLKIT = "sagemaker_training.trainer"
"""In this process where SageMaker's toolkit calls `main` itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the training job that this process belongs to, and leave as SageMaker expects it.

    The same in script mode (hyperparameters come as arguments), in a container (they come in a file) and as the module
    of `sagemaker-training` (`SAGEMAKER_TRAINING_MODULE=vramfit.integrations.sagemaker:main`). The run goes on from the
    checkpoint folder where that holds one. Exit codes are those of `vramfit train`: 143 after SIGTERM and a checkpoint.

    Args:
        arguments: `--name value`; None takes the command line's.
    """
    code, reason = _run(list(sys.argv[1:] if arguments is None else arguments))
    sys.stdout.flush()
    if _TOOLKIT not in sys.modules:
        sys.exit(code)
    if code in STOPPED:  # the toolkit would call anything that leaves quietly a success
        sys.stderr.flush()
        os._exit(code)
    if code:
        raise sys.modules[f"{_TOOLKIT.partition('.')[0]}.errors"].ClientError(reason)


def _run(arguments: list[str]) -> tuple[int, str]:
    """Exit code and, where it is not 0, the reason, which is left where SageMaker looks for it."""
    job, request = None, None
    try:
        job = read_job(read_arguments(arguments) if arguments else None)
        request = make_request(job)
        _train(job, request)
        return 0, ""
    except Interrupted as stopped:
        print(f"{stopped}.", flush=True)
        return stopped.exit_code, str(stopped)
    except Exception as error:
        if not isinstance(error, VramfitError):
            traceback.print_exc()
        reason = reason_of(error, job, request)
        print(f"Error: {reason}", file=sys.stderr, flush=True)
        write_failure(output_folder(), reason)
        return getattr(error, "exit_code", 1), reason


def _train(job: Job, request: TrainRequest) -> None:
    _make_folder(job.checkpoint_dir)
    with stop_request(resumes=True) as stop:
        from vramfit.runtime.training.train import train

        stop.check()
    if needs_torchrun(job, request):
        run_command(torchrun_command(job, request))
    else:
        train(request, on_event=MetricLines().show)
    if job.current_host == job.hosts[0] and os.environ.get("RANK", "0") == "0":
        leave_model(Path(request.output), job)


def leave_model(output: Path, job: Job) -> None:
    """Put the saved model where SageMaker packs it, and the records of the run into the folder for other output."""
    for folder in (job.model_dir, job.output_data_dir):
        _make_folder(folder)
    for path in sorted(output.iterdir()):
        if path.name in NOT_THE_MODEL:
            continue
        place = (job.output_data_dir if path.name in RECORDS else job.model_dir) / path.name
        if path.is_dir():
            shutil.copytree(path, place, dirs_exist_ok=True)
        else:
            shutil.copy2(path, place)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VramfitError(f"cannot make {folder}: {error.strerror}", hint="is this a SageMaker job?") from None
