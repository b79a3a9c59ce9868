"""What verbs share: results on stdout, remarks on stderr, JSON that is only JSON, and the line of progress."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vramfit.errors import RankFailed, VramfitError
from vramfit.records.codec import to_data
from vramfit.stages import Listener, heard

DOES_NOT_FIT = 3
DISAGREES = 4
INTERRUPTED = 130  # 128 + SIGINT, as shells report it; `vramfit.__main__` says it too
BROKEN_PIPE = 141  # 128 + SIGPIPE
"""Exit codes; those of errors are `VramfitError.exit_code`."""
STDOUT = "standard output"
IMPORTED = {"torch": "importing PyTorch", "transformers": "importing transformers"}
"""Packages whose import takes seconds."""


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        with _named(STDOUT if not self.stderr else None):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Rich would exit with code 1, which means an error; `main` knows what it is."""
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A console that wraps to the terminal, and to nothing narrower than a table needs elsewhere."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 140
    return _Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


@contextmanager
def _named(stream: str | None) -> Iterator[None]:
    """Inside, a stream that cannot be written is named by the error."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or stream
        raise


def write_out(text: str) -> None:
    """Plain text on stdout."""
    with _named(STDOUT):
        sys.stdout.writelines(text.splitlines(keepends=True))  # unbuffered, the rest of one long text could get lost


def flush_out() -> None:
    """All that was written to stdout, through."""
    with _named(STDOUT):
        sys.stdout.flush()


def print_json(record: Any) -> None:
    """Any record or list of records as indented JSON on stdout."""
    write_out(json.dumps(to_data(record), indent=2, ensure_ascii=False) + "\n")


def show(record: Any, render: Callable[[Any], Any], *, json: bool) -> None:
    """A result: as JSON, or as `render` draws it."""
    if json:
        print_json(record)
    else:
        console().print(render(record))


def say(text: str, *, stderr: bool = True, style: str = "") -> None:
    """One line as it is, on stderr unless told: no markup, no line breaks inside paths."""
    console(stderr=stderr).print(text, style=style, markup=False, soft_wrap=True)


def say_error(what: str, hint: str | None) -> None:
    """An error and what to do about it, on stderr."""
    say(what, style="red" if what.startswith("Error") else "")
    if hint:
        say(f"  → {hint}")


def leave(code: int) -> NoReturn:
    """End the verb with an exit code."""
    raise typer.Exit(code)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An unframed table: a header line, one line a row; columns named in `right` hold numbers."""
    result = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2))
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return result


def print_aligned(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    spare: Sequence[str] = (),
    above: Mapping[int, str] | None = None,
) -> None:
    """A long plain list in columns: Rich's tables measure every cell, which these do not need.

    Columns in `spare` are left out, one after another, where the terminal is too narrow for all. `above` has headings:
    the number of a row → what stands above it.
    """
    out = console()
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for name in spare:
        if sum(widths) + 2 * (len(widths) - 1) > out.width:
            place = list(columns).index(name)
            columns, *rows = [[*row[:place], *row[place + 1 :]] for row in (columns, *rows)]
            del widths[place]
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in [columns, *rows]
    ]
    out.print(lines[0], style="bold", markup=False, soft_wrap=True)
    headings = above or {}
    write_out("".join(f"\n{headings[n]}\n{row}\n" if n in headings else f"{row}\n" for n, row in enumerate(lines[1:])))


def prints() -> bool:
    """Whether this process prints: it is alone, or rank 0."""
    return _rank() == 0


@contextmanager
def only_rank_zero_prints() -> Iterator[None]:
    """Inside, errors of other ranks set their exit code and print nothing; rank 1 prints where rank 0 is lost."""
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        takes_over = isinstance(error, RankFailed) and error.rank == 0 and _rank() == 1
        if prints() or takes_over:
            raise
        raise typer.Exit(error.exit_code if isinstance(error, VramfitError) else 1) from None


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() and "WORLD_SIZE" in os.environ else 0


@contextmanager
def working(what: str, err: Console | None = None) -> Iterator[None]:
    """Inside, a terminal shows what is done and at which stage; pipes and files see nothing.

    The first line is written before the block begins, so before anything that the block imports. What is printed
    inside goes above the line where it goes through `err`.

    Args:
        what: in words, such as "Planning bert-base-uncased".
        err: the console of stderr; a new one unless given.
    """
    if not (sys.stderr.isatty() and prints()):
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
    """An import hook that finds no module: it tells the listener what is about to be imported."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in IMPORTED:
            self._listener(IMPORTED[name])
