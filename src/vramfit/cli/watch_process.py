"""NVML's view of a process: what the driver charges it with, and nothing of what is inside."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from vramfit.cli.terminal import console, print_json
from vramfit.errors import VramfitError
from vramfit.records.watch import MemorySample, WatchRecord
from vramfit.report.words import size

if TYPE_CHECKING:
    from vramfit.devices.probe import PresentGPU

INTERRUPTED = 130
ONLY_NVML = "NVML's view only: what the driver charges the process with, not what is inside"
NO_DRIVER = "no NVIDIA driver answers on this machine, so nothing is known of a process's GPU memory"
MAX_SAMPLES = 10_000


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
