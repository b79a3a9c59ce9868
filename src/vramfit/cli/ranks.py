"""Of several processes that run one command, the first speaks; of its end, the first that is left."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from vramfit.errors import RankFailed, VramfitError


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
