"""What verbs share: results on stdout, remarks on stderr, JSON that is only JSON."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vramfit.records.codec import to_data

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]


STDOUT = "standard output"


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        with _named(STDOUT if not self.stderr else None):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Rich would leave with 1, which means an error; `main` knows what it is."""
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


def table(*columns: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    """An unframed table: a header line, one line a row; columns named in `right` hold numbers."""
    result = Table(box=None, title=title, title_justify="left", header_style="bold", pad_edge=False, padding=(0, 2))
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return result


def print_aligned(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), spare: Sequence[str] = ()
) -> None:
    """A long plain list in columns: Rich's tables measure every cell, which these do not need.

    Columns in `spare` are left out, one after another, where the terminal is too narrow for all.
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
    write_out("\n".join(lines[1:]) + "\n")
