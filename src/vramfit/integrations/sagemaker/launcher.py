"""Several GPUs or hosts: the command line of torchrun, and its process watched over."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vramfit.errors import NoPlanFits, VramfitError
from vramfit.integrations.sagemaker.job import Job
from vramfit.runtime.training.events import Terminated
from vramfit.runtime.training.request import TrainRequest

PORT = 29_500
SWITCHES = ("resume", "skip_bad_rows", "trust_remote_code")
FIRST = ("data",)
"""An argument without a name."""
NAMES = {"text_columns": "--text-column"}
WHAT, HINT = "Error: ", "  → "
"""How `vramfit train` says what went wrong, and what to do."""
DOES_NOT_FIT = re.compile(rf"exitcode\s*:\s*{NoPlanFits.exit_code}\b")
"""How torchrun tells the exit code of a process."""


def needs_torchrun(job: Job, request: TrainRequest, environment: Mapping[str, str] | None = None) -> bool:
    """Whether there is more than one GPU to run on, and nobody has started a process for each."""
    env = os.environ if environment is None else environment
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
        if field.name in FIRST or value is None or value == field.default or value == ():
            if field.name == "max_grad_norm" and value is None:
                made += ["--max-grad-norm", "0"]
            continue
        name = NAMES.get(field.name, f"--{field.name.replace('_', '-')}")
        if field.name in SWITCHES:
            made.append(name)
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
        raise Terminated("Terminated; the newest checkpoint is where the next job goes on")
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
