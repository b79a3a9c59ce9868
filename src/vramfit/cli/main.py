"""`vramfit`: the verbs put together, and errors turned into two lines and an exit code."""

import gc
import inspect
import os
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from vramfit import __version__
from vramfit.cli.options import ALL_HELP
from vramfit.cli.terminal import BROKEN_PIPE, INTERRUPTED, STDOUT, flush_out, say_error
from vramfit.errors import VramfitError
from vramfit.quiet import CHATTY, hush
from vramfit.records.codec import FULL_DISK, cannot_write

VERBS = (
    *("estimate", "max-batch", "plan", "measure", "receipts", "calibrate", "load", "train", "distill", "evaluate"),
    *("compare", "predict", "encode", "serve", "trim", "prune", "export", "gpus", "models", "doctor", "explain"),
    *("watch", "report", "web", "mcp", "sagemaker"),
)
"""In the order of the help."""
MODULES = {
    "estimate": ("estimate", "max-batch", "measure", "receipts", "calibrate", "report"),
    "plan": ("plan", "sagemaker"),
    "inference": ("evaluate", "predict"),
    "serve": ("serve", "web", "mcp"),
    "catalogue": ("gpus", "models"),
    "doctor": ("doctor", "explain", "load"),
}
"""Module of this room → its verbs, where they are not the one verb of its name."""
WATCH = "watch"
WATCHED = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""All that follows the command of `watch` is the command's."""
ALIASES = {"gpus": "num-gpus", "nodes": "num-nodes"}
"""Other names of options, which no help shows."""


def _without_types(parameters: list[Any]) -> list[Any]:
    """Options that take nothing show nothing to take in the help."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class _ReaderGoneError(Exception):
    """A broken pipe under another name: typer would exit with code 1, which means an error."""


class _InterruptedError(Exception):
    """Ctrl-C under another name: typer would exit without a message."""


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        gc.enable()  # off until now, while modules are imported
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _ReaderGoneError from None
        except KeyboardInterrupt as interrupt:
            raise _InterruptedError(str(interrupt)) from None

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _Verb(TyperCommand):
    rare: frozenset[str] = frozenset()
    """Parameters that `--help` leaves to `--help-all`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        named: list[Any] = [p for p in self.params if p.name in self.rare]
        left_out = [p for p in named if not p.hidden]
        if ALL_HELP in ctx.meta or not left_out:
            super().format_help(ctx, formatter)
            return
        for parameter in left_out:
            parameter.hidden = True
        super().format_help(ctx, formatter)
        for parameter in left_out:
            parameter.hidden = False


def make_app(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """The command line with some verbs: to put together those that are not asked for takes longer than an answer."""
    app = _empty_app()
    for name in verbs:
        verb = find_verb(name)
        app.command(
            name=name,
            cls=type("_Verb", (_Verb,), {"rare": verb.rare}),
            epilog=f"Example: [bold]{escape(verb.example)}[/bold]",
            context_settings=WATCHED if name == WATCH else _aliases(verb),
        )(verb)
    return app


def find_verb(name: str) -> Any:
    """The function of a verb; it carries an `example`."""
    return getattr(import_module(f"vramfit.cli.{_module_of(name)}"), name.replace("-", "_"))


def _module_of(name: str) -> str:
    return next((module for module, verbs in MODULES.items() if name in verbs), name)


def told(name: str) -> str:
    """What a verb does: the first sentence below its `def`, read without an import of its module."""
    source = Path(__file__).with_name(f"{_module_of(name)}.py").read_text(encoding="utf-8")
    (first,) = re.findall(rf'^def {name.replace("-", "_")}\(.*?"""(.*?)(?:\n\n|""")', source, re.DOTALL | re.MULTILINE)
    return " ".join(first.split())


def _aliases(verb: Any) -> dict[str, Any]:
    """Settings that let the options of a verb go by their other names."""
    own = {name.replace("_", "-") for name in inspect.signature(verb).parameters}
    known = {other: name for other, name in ALIASES.items() if name in own}
    return {"token_normalize_func": lambda name: known.get(name, name)}


def _overview() -> typer.Typer:
    """The command line where no verb is asked for: it lists them all and has none."""
    app = _empty_app()
    for name in VERBS:
        app.command(name=name, help=told(name))(lambda: None)
    return app


def _empty_app() -> typer.Typer:
    app = typer.Typer(
        name="vramfit",
        cls=_Group,
        help="Fit BERT-class models into GPU memory: predict, plan, load and run inside a budget.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vramfit {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Run the command line; the only place that catches errors."""
    own, others = _own_arguments(sys.argv[1:])
    debug = "--debug" in own
    if not debug:
        hush(*CHATTY)
    # --debug may stand anywhere; typer knows it only before the verb
    arguments = [*(a for a in own if a != "--debug"), *others]
    try:
        asked = next((a for a in arguments if not a.startswith("-")), None)
        app = make_app([asked]) if asked in VERBS else _overview()
        code = app(args=arguments, prog_name="vramfit", standalone_mode=False)
        flush_out()
    except (_ReaderGoneError, BrokenPipeError):
        _give_up_stdout()  # the reader (head, less) has gone
        code = BROKEN_PIPE
    except (_InterruptedError, KeyboardInterrupt) as interrupt:
        say_error(f"Interrupted: {interrupt}." if str(interrupt) else "Interrupted.", None)
        code = INTERRUPTED
    except VramfitError as error:
        if debug:
            raise
        say_error(f"Error: {error}", error.hint)
        code = error.exit_code
    except typer.Abort:
        code = INTERRUPTED
    except Exception as error:
        if debug or getattr(error, "errno", None) not in FULL_DISK:
            code = _usage_or_bug(error, debug=debug)
        else:
            code = _disk_is_full(error)
    sys.exit(code if isinstance(code, int) else 0)


def _own_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what belongs to a command that is to be watched."""
    if WATCH not in arguments:
        return arguments, []
    verb = arguments.index(WATCH)
    theirs = next((i for i, a in enumerate(arguments) if i > verb and not a.startswith("-")), len(arguments))
    return arguments[:theirs], arguments[theirs:]


def _usage_or_bug(error: Exception, *, debug: bool) -> int:
    """A wrong command line is shown as typer words it; anything else is a bug of ours."""
    shown = getattr(error, "format_message", None)
    if shown is not None:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "vramfit"
        if shown():  # without a verb, the help has been shown
            say_error(f"Error: {shown()}", f"{path} --help shows what it takes")
        return int(getattr(error, "exit_code", 2))
    if debug:
        raise error
    text = " ".join(str(error).split()) or type(error).__name__
    say_error(
        f"Error: unexpected {type(error).__name__}: {text[:300]}",
        "run the same command with --debug for the traceback, and report it: this is a bug in vramfit",
    )
    return 1


def _disk_is_full(error: Any) -> int:
    """Say what could not be written, where that is known, and give the exit code of an error."""
    if error.filename == STDOUT:
        _give_up_stdout()
    lost = cannot_write(Path(error.filename or "a file"), error)
    say_error(f"Error: {lost}", lost.hint)
    return lost.exit_code


def _give_up_stdout() -> None:
    """Keep Python from flushing again what cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
