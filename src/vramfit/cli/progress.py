"""`working`: a line on stderr that says what a verb is doing while it is at work, and is gone when it is done."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from vramfit.cli.terminal import console
from vramfit.errors import RankFailed, VramfitError
from vramfit.stages import Listener, heard


def speaks() -> bool:
    """Whether this process shows anything: alone, or rank 0."""
    return _rank() == 0


@contextmanager
def only_one_speaks() -> Iterator[None]:
    """Inside, errors of other ranks end them without a word: rank 0 tells of them, or rank 1 if it is rank 0 that is
    lost."""
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        takes_over = isinstance(error, RankFailed) and error.rank == 0 and _rank() == 1
        if speaks() or takes_over:
            raise
        raise typer.Exit(error.exit_code if isinstance(error, VramfitError) else 1) from None


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() and "WORLD_SIZE" in os.environ else 0


IMPORTED = {"torch": "importing PyTorch", "transformers": "importing transformers"}
"""Packages whose import takes seconds."""


@contextmanager
def working(what: str, err: Console | None = None) -> Iterator[None]:
    """Inside, a terminal shows what is done and at which stage; pipes and files see nothing.

    The first line is written before the block begins, so before anything that the block imports. What is printed
    inside goes above the line where it goes through `err`.

    Args:
        what: in words, such as "Planning bert-base-uncased".
        err: the console of stderr; a new one unless given.
    """
    if not (sys.stderr.isatty() and speaks()):
        yield
        return
    from rich.live import Live
    from rich.spinner import Spinner

    spinner = Spinner("dots", Text(f"{what} …"), style="status.spinner")

    def show(stage: str) -> None:
        spinner.update(text=Text(f"{what}: {stage} …"))

    def show_at_once(stage: str) -> None:
        show(stage)
        live.refresh()  # an import leaves the thread that draws little time

    err = err if err is not None else console(stderr=True)
    shown = Live(spinner, console=err, refresh_per_second=12.5, transient=True, redirect_stdout=sys.stdout.isatty())
    with shown as live, heard(show), _imports_told(show_at_once):
        yield


@contextmanager
def _imports_told(listener: Listener) -> Iterator[None]:
    finder = _Finder(listener)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Finds nothing: it is asked first, and says what is about to be imported."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in IMPORTED:
            self._listener(IMPORTED[name])
