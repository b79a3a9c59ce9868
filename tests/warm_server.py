"""A process that has imported what verbs import, and becomes `python ARGUMENTS` as often as it is asked: by a fork.

`tests/warm.py` starts it and asks: a line of JSON, with the file handles of the new process and one more, to which its
process id goes at once and its exit code when it ends.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import weakref

IMPORTED = (
    *("torch", "torch._dynamo"),
    *("transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert"),
    *("rich.console", "rich.table", "typer.rich_utils", "pydantic.main", "peft", "tokenizers"),
    *(f"vramfit.cli.{room}" for room in ("main", "estimate", "plan", "train", "inference")),
    *("vramfit.planner.plan", "vramfit.runtime.training.train", "vramfit.runtime.inference", "vramfit.loader.load"),
    *("vramfit.report.estimate", "vramfit.report.plan", "vramfit.doctor.explain"),
)
"""Large libraries, and what verbs import when they run: nothing that looks at the terminal or at the environment."""
MAX_MESSAGE_BYTES = 2**20


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what was imported is no garbage
    for registered in weakref.finalize._registry:  # type: ignore[attr-defined]
        registered.atexit = False  # libraries of operators: taking them apart is of no use to a process that ends
    asked = socket.socket(fileno=int(sys.argv[1]))
    waiting = selectors.DefaultSelector()
    waiting.register(asked, selectors.EVENT_READ)
    children: dict[int, tuple[int, int]] = {}  # a handle that can be read when the child has ended → its id, its answer
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not asked:
                handle = key.fd
                child, answer = children.pop(handle)
                waiting.unregister(handle)
                os.close(handle)
                _, status = os.waitpid(child, 0)
                _tell(answer, os.waitstatus_to_exitcode(status))
                os.close(answer)
                continue
            text, handles, _, _ = socket.recv_fds(asked, MAX_MESSAGE_BYTES, 4)
            if not text:
                for child, _ in children.values():
                    os.kill(child, signal.SIGKILL)
                return
            child = os.fork()
            if not child:
                waiting.close()
                asked.close()
                for other in (handles[3], *children, *(answer for _, answer in children.values())):
                    os.close(other)
                _leave(_code_of(handles[:3], **json.loads(text)))
            for handle in handles[:3]:
                os.close(handle)
            _tell(handles[3], child)
            ended = os.pidfd_open(child)
            children[ended] = (child, handles[3])
            waiting.register(ended, selectors.EVENT_READ)


def _tell(answer: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # who asked has gone
        os.write(answer, f"{number}\n".encode())


def _code_of(streams: list[int], arguments: list[str], environment: dict[str, str], folder: str) -> int:
    """The exit code of `python ARGUMENTS`; an end that says something is left to the interpreter."""
    try:
        _become(streams, arguments, environment, folder)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0
    return 0


def _leave(code: int) -> None:
    """End as an interpreter does, but for taking apart a thousand modules, which takes ten times as long as a fork."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # the interpreter says so
    os._exit(code & 0xFF)


def _become(streams: list[int], arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Run `python ARGUMENTS`: a module, code or a script."""
    for number, handle in enumerate(streams):
        os.dup2(handle, number)
        os.close(handle)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which whatever runs in the background ignores
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    how, *rest = arguments
    if how == "-m":
        sys.argv[1:] = rest[1:]
        sys.path[0] = folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path[0] = ""
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.argv[:] = arguments
        sys.path[0] = os.path.dirname(how)
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    main()
