"""`vramfit watch`: a Python script or module under the watch; for any other process, NVML's view of it.

NVML tells what the driver charges a process with, and nothing of what is inside.
"""

import json as json_
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.text import Text

from vramfit.cli.options import Json, argument, opt, option, verb
from vramfit.cli.terminal import console, leave, print_json
from vramfit.errors import VramfitError
from vramfit.records.watch import MemorySample, WatchRecord
from vramfit.report.words import size

if TYPE_CHECKING:
    from vramfit.devices.probe import PresentGPU

ONLY_NVML = "NVML's view only: what the driver charges the process with, not what is inside"
NO_DRIVER = "no NVIDIA driver answers on this machine, so nothing is known of a process's GPU memory"
MAX_SAMPLES = 10_000
_PYTHON = re.compile(r"python[0-9.]*(?:\.exe)?")
_VALUED = ("-W", "-X", "--check-hash-based-pycs")
"""Options of the interpreter that take a value."""


@dataclass(frozen=True, kw_only=True)
class InsideOptions:
    """What needs the watch to be inside the process."""

    detailed: bool = opt(False, "Follow every operator: largest tensors, leaks, what made them. Slower.")
    jsonl: Path | None = opt(None, "Write every sample and finding as JSON lines.", "FILE")
    prometheus: Path | None = opt(None, "Keep a file in Prometheus' text format, for its textfile collector.", "FILE")

    def refuse(self, what: str) -> None:
        """Refuse these options for a process that can only be seen from outside."""
        given = [f"--{name}" for name in ("detailed", "jsonl", "prometheus") if getattr(self, name)]
        if given:
            raise typer.BadParameter(f"{', '.join(given)}: of {what}, only NVML's view can be had")


@verb("vramfit watch --detailed train.py --epochs 1")
def watch(
    command: Annotated[
        list[str],
        argument(
            "A Python script or -m and a module, with its arguments; another command; or the number of a process.",
            "COMMAND",
        ),
    ],
    inside: InsideOptions,
    interval: Annotated[float, option("Seconds between samples.", "SECONDS", min=0.05, max=3600)] = 0.5,
    no_live: Annotated[bool, option("No live view; only the summary at the end.", None, "--no-live")] = False,
    json: Json = False,
) -> None:
    """Watch a program's GPU memory while it runs, by phase, and name what it wastes, with file and line.

    Options of vramfit watch go before the command; everything after it belongs to the command. The exit code, or the
    signal, is the command's. With --json, the command's output goes to stderr.
    """
    if len(command) == 1 and command[0].isascii() and command[0].isdigit():
        inside.refuse("a process that runs already")
        leave(watch_process(int(command[0]), interval_s=interval, live=not no_live, json=json))
    flags, arguments = _python_command(command)
    if arguments is None:
        inside.refuse(f"{command[0]}, which is not Python")
        leave(watch_command(command, interval_s=interval, json=json))
    options = {
        "detailed": inside.detailed,
        "jsonl": str(inside.jsonl.absolute()) if inside.jsonl else None,
        "prometheus": str(inside.prometheus.absolute()) if inside.prometheus else None,
        "interval_s": interval,
        "live": not no_live and not json and sys.stderr.isatty(),
        "json": json,
    }
    sys.stdout.flush()
    # the command takes this process's place: signals and exit codes need no passing on
    words = [sys.executable, *flags, "-m", "vramfit.cli.watched", json_.dumps(options), *arguments]
    os.execv(sys.executable, words)


def _python_command(command: list[str]) -> tuple[list[str], list[str] | None]:
    """Options of the interpreter, and script, -m or -c with what follows; None for what is no Python."""
    first = command[0]
    if _PYTHON.fullmatch(Path(first).name):
        _same_interpreter(first)
        return _split(command[1:])
    if first in ("-m", "-c"):
        return [], command
    if first.endswith(".py") or (Path(first).is_file() and not os.access(first, os.X_OK)):
        if not Path(first).is_file():
            raise VramfitError(
                f"there is no script {first}", hint="give the path of a Python script, or -m and a module"
            )
        return [], command
    if shutil.which(first) is None:
        raise VramfitError(
            f"{first} is neither a script nor a command",
            hint="vramfit watch train.py …, vramfit watch -m package.module …, or vramfit watch PID",
        )
    return [], None


def _split(words: list[str]) -> tuple[list[str], list[str] | None]:
    flags: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        flags.append(rest.pop(0))
        if flags[-1] in _VALUED and rest:
            flags.append(rest.pop(0))
    if not rest or rest[0] == "-":
        raise VramfitError("there is no script to watch", hint="vramfit watch python train.py")
    if rest[0] not in ("-m", "-c") and not Path(rest[0]).is_file():
        raise VramfitError(f"there is no script {rest[0]}", hint="give the path of a Python script, or -m and a module")
    return flags, rest


def _same_interpreter(name: str) -> None:
    """Say so where another interpreter was named than the one that has vramfit."""
    found = shutil.which(name)
    if found is None or Path(found).resolve() != Path(sys.executable).resolve():
        console(stderr=True).print(
            f"Running with {sys.executable}, where vramfit is installed, not with {name}.", style="dim", markup=False
        )


def watch_process(pid: int, *, interval_s: float, live: bool, json: bool) -> int:
    """Show what a process holds until it ends or Ctrl-C.

    Raises:
        VramfitError: there is no such process, or no driver to ask.
    """
    _require_process(pid)
    if not _probe():
        raise VramfitError(
            NO_DRIVER,
            hint="`vramfit watch SCRIPT.py` watches from the inside, on a CPU too; `vramfit doctor` checks the driver",
        )
    err = console(stderr=True)
    err.print(f"Process {pid}: {ONLY_NVML}. Ctrl-C ends the watch, not the process.", style="dim")
    follow = _Follow(pid)
    try:
        with Live(console=err, auto_refresh=False, transient=True) as view:
            while _is_running(pid):
                line = follow.look()
                if live and err.is_terminal:
                    view.update(Text(line), refresh=True)
                elif not err.is_terminal:
                    err.print(line, markup=False)
                time.sleep(interval_s)
    except KeyboardInterrupt:
        pass
    follow.show(json=json)
    return 0


def watch_command(command: list[str], *, interval_s: float, json: bool) -> int:
    """Run a command that is no Python and say what NVML saw of it; its exit code, or 128 and its signal."""
    err = console(stderr=True)
    known = bool(_probe())
    says = ONLY_NVML if known else NO_DRIVER
    err.print(f"{command[0]} is not a Python script. {says[:1].upper()}{says[1:]}.", style="dim", markup=False)
    sys.stdout.flush()
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT and started:  # Ctrl-C: the terminal tells the child too
            started[0].send_signal(number)

    # handlers of ours, not SIG_IGN: a child inherits what is ignored
    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    child = subprocess.Popen(command, stdout=sys.stderr if json else None)
    started.append(child)
    follow = _Follow(child.pid)
    ended = threading.Event()

    def look_on() -> None:
        while not ended.wait(interval_s):
            follow.look()

    if known:
        threading.Thread(target=look_on, daemon=True).start()
    code = child.wait()
    ended.set()
    for number, handler in previous.items():
        signal.signal(number, handler)
    if known:
        follow.show(json=json)
    return code if code >= 0 else 128 - code


class _Follow:
    """The samples of one process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.samples: list[MemorySample] = []
        self._began_at = time.perf_counter()

    def look(self) -> str:
        """Ask once; a line that says what was found."""
        held = {gpu.index: used for gpu in _probe() if (used := _held(gpu, self.pid)) is not None}
        time_s = time.perf_counter() - self._began_at
        if len(self.samples) < MAX_SAMPLES:
            total = sum(held.values()) if held else None
            self.samples.append(MemorySample(time_s=time_s, phase="other", step=0, process_bytes=total))
        shown = ", ".join(f"GPU {index} {size(used)}" for index, used in held.items())
        return f"{time_s:8.1f} s  process {self.pid}  {shown or 'holds no GPU memory, as far as the driver says'}"

    def show(self, *, json: bool) -> None:
        peak = max((s.process_bytes for s in self.samples if s.process_bytes is not None), default=None)
        seconds = time.perf_counter() - self._began_at
        if json:
            record = WatchRecord(
                device=f"process {self.pid}",
                detailed=False,
                time_s=seconds,
                num_steps=0,
                num_forwards=0,
                peak_process_bytes=peak,
                samples=tuple(self.samples),
                notes=(ONLY_NVML,),
            )
            print_json(record)
        else:
            most = f"at most {size(peak)}" if peak is not None else "no GPU memory that the driver would tell of"
            console(stderr=True).print(f"Process {self.pid} held {most} in {seconds:.0f} s. {ONLY_NVML}.", markup=False)


def _probe() -> "tuple[PresentGPU, ...]":
    from vramfit.devices.probe import probe

    return probe()


def _held(gpu: "PresentGPU", pid: int) -> int | None:
    return next((process.used_bytes for process in gpu.processes if process.pid == pid), None)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _require_process(pid: int) -> None:
    if not 0 < pid < 2**31 or not _is_running(pid):
        raise VramfitError(f"there is no process {pid}", hint="ps, or nvidia-smi, show the numbers of processes")
