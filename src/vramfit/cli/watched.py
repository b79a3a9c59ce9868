"""The process in which a watched script runs: `python -m vramfit.cli.watched OPTIONS SCRIPT …`, started by the verb."""

import json
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from rich.live import Live

from vramfit.cli.terminal import console, print_json, say_error, working
from vramfit.errors import VramfitError
from vramfit.records.watch import WatchRecord


def main() -> None:
    """Run a script as Python would, under the watch; its errors and its exit code stay its own."""
    options = json.loads(sys.argv[1])
    sys.argv = sys.argv[2:]
    out = os.dup(1)
    as_json, view = options.pop("json"), _LiveView() if options.pop("live") else None
    if as_json:
        os.dup2(2, 1)  # the script's own output makes way
    sys.excepthook = _trimmed(sys.excepthook)
    try:
        with working("Beginning to watch") if view is not None else nullcontext():
            from vramfit.runtime.watching import watch
        watching = watch(**options, on_sample=view.show if view is not None else None, show_findings=False)
        watching.__enter__()
    except VramfitError as error:
        say_error(f"Error: {error}", error.hint)
        sys.exit(error.exit_code)
    if view is not None:
        view.start()
    failure: tuple[Any, Any, Any] = (None, None, None)
    try:
        _run_command()
    except BaseException as error:
        failure = (type(error), error, error.__traceback__)
        raise
    finally:
        if view is not None:
            view.stop()
        watching.__exit__(*failure)
        _show(watching.record, out if as_json else None)


class _LiveView:
    """The live view, above which the script's own output goes on."""

    def __init__(self) -> None:
        self._live = Live(console=console(stderr=True), auto_refresh=False, transient=True)

    def start(self) -> None:
        self._live.start()

    def show(self, record: WatchRecord) -> None:
        from vramfit.report.findings import render_live

        if self._live.is_started:
            self._live.update(render_live(record), refresh=True)

    def stop(self) -> None:
        self._live.stop()


def _run_command() -> None:
    """What `python SCRIPT`, `python -m MODULE` or `python -c CODE` does."""
    if sys.argv[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-c":
        sys.path[0] = ""
        code, sys.argv = sys.argv[1], ["-c", *sys.argv[2:]]
        exec(compile(code, "<string>", "exec"), _main_module(None).__dict__)
    else:
        script = Path(sys.argv[0])
        sys.path[0] = str(script.resolve().parent)
        exec(compile(script.read_bytes(), str(script), "exec"), _main_module(str(script)).__dict__)


def _main_module(file: str | None) -> ModuleType:
    """A module that stands for the program, as `__main__` does."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    if file is not None:
        module.__file__ = file
    sys.modules["__main__"] = module
    return module


def _trimmed(hook: Callable[..., Any]) -> Callable[..., None]:
    """Tracebacks begin with the script's own frames."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours = (__file__, "<frozen runpy>")
        first = trace
        while first is not None and first.tb_frame.f_code.co_filename in ours:
            first = first.tb_next
        trace = first or (None if issubclass(kind, SyntaxError | ImportError) else trace)  # of which it says all
        hook(kind, error.with_traceback(trace), trace)

    return show


def _show(record: WatchRecord, out: int | None) -> None:
    """The record on stdout as JSON, or its summary on stderr."""
    if out is not None:
        sys.stdout.flush()
        os.dup2(out, 1)
        print_json(record)
        sys.stdout.flush()
        os.dup2(2, 1)
        return
    from vramfit.report.findings import render_watch

    err = console(stderr=True)
    err.print()
    err.print(render_watch(record))


if __name__ == "__main__":
    main()
