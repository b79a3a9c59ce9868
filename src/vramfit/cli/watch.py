"""`vramfit watch`: a Python script or module under the watch; for a process that runs already, NVML's view."""

import json as json_
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli.terminal import Json, console
from vramfit.errors import VramfitError

EXAMPLE = "vramfit watch --detailed train.py --epochs 1"
CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
_PYTHON = re.compile(r"python[0-9.]*(?:\.exe)?")
_VALUED = ("-W", "-X", "--check-hash-based-pycs")
"""Options of the interpreter that take a value."""


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="A Python script, -m and a module, either with its arguments; another command; or a process number.",
        ),
    ],
    detailed: Annotated[
        bool,
        typer.Option("--detailed", help="Follow every operator: largest tensors, leaks, what made them. Slower."),
    ] = False,
    jsonl: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every sample and finding as JSON lines.")
    ] = None,
    prometheus: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep a file in Prometheus' text format, for its textfile collector."),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.05, max=3600, metavar="SECONDS", help="Seconds between samples.")
    ] = 0.5,
    no_live: Annotated[bool, typer.Option("--no-live", help="No live view; only what it came to.")] = False,
    json: Json = False,
) -> None:
    """Watch a program's GPU memory while it runs, by phase, and name what it wastes, with file and line.

    Put options of the watch before the command; all that follows is the command's. Leaves as the command does: its
    exit code, or its signal. With --json, the command's own output goes to stderr.
    """
    inside = [
        name for name, given in (("--detailed", detailed), ("--jsonl", jsonl), ("--prometheus", prometheus)) if given
    ]
    if len(command) == 1 and command[0].isascii() and command[0].isdigit():
        _refuse(inside, "a process that runs already")
        from vramfit.cli.watch_process import watch_process

        raise typer.Exit(watch_process(int(command[0]), interval_s=interval, live=not no_live, json=json))
    flags, arguments = _python_command(command)
    if arguments is None:
        _refuse(inside, f"{command[0]}, which is not Python")
        from vramfit.cli.watch_process import watch_command

        raise typer.Exit(watch_command(command, interval_s=interval, json=json))
    options = {
        "detailed": detailed,
        "jsonl": str(jsonl.absolute()) if jsonl else None,
        "prometheus": str(prometheus.absolute()) if prometheus else None,
        "interval_s": interval,
        "live": not no_live and not json and sys.stderr.isatty(),
        "json": json,
    }
    sys.stdout.flush()
    # the command takes this process's place: signals and exit codes need no passing on
    words = [sys.executable, *flags, "-m", "vramfit.cli.watched", json_.dumps(options), *arguments]
    os.execv(sys.executable, words)


def _refuse(options: list[str], what: str) -> None:
    if options:
        raise typer.BadParameter(f"{', '.join(options)}: of {what}, only NVML's view can be had")


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
