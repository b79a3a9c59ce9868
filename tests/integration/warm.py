"""A process that has imported what verbs import, and becomes `vramfit` as often as it is asked: each time by a fork.

It reads a command a line as JSON, and answers with its exit code.
"""

import gc
import importlib
import json
import os
import runpy
import sys

IMPORTED = (
    *("torch", "torch._dynamo"),
    *("transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert"),
    *("rich.console", "rich.table", "typer.rich_utils", "pydantic.main", "peft", "tokenizers"),
    *(f"vramfit.cli.{room}" for room in ("main", "estimate", "plan", "train", "inference")),
    *("vramfit.planner.plan", "vramfit.runtime.training.train", "vramfit.runtime.inference", "vramfit.loader.load"),
    *("vramfit.report.estimate", "vramfit.report.plan", "vramfit.doctor.explain"),
)
"""Large libraries, and what verbs import when they run: nothing that looks at the terminal or at the environment."""


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what was imported is no garbage
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if not child:
            _become(**json.loads(line))
            return  # to leave as an interpreter does
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(arguments: list[str], environment: dict[str, str], folder: str, streams: list[str]) -> None:
    """Run `python -m vramfit ARGUMENTS`, its streams read from and written to files."""
    for number, (path, flags) in enumerate(zip(streams, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        os.dup2(os.open(path, flags), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[1:] = arguments
    runpy.run_module("vramfit", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
