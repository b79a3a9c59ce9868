"""`quiet`: packages imported or called without their remarks on extensions that a machine has no use for."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

CHATTY = ("torch.utils._pytree", "torchao", "transformers")
"""Libraries that warn while they are imported, of things a user of vramfit cannot change."""


def hush(*names: str) -> None:
    """Only errors of these loggers are heard from now on: for a process of our own."""
    for name in names:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.ERROR))


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Only errors of these loggers are heard while it lasts; a level that is set meanwhile stays."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    hush(*names)
    during = [logger.level for logger in loggers]
    try:
        yield
    finally:
        for logger, level, hushed in zip(loggers, before, during, strict=True):
            if logger.level == hushed:
                logger.setLevel(level)


def import_modelling() -> None:
    """Import what transformers' models are made of, which imports torchao where that is installed."""
    if "transformers.modeling_utils" not in sys.modules:
        with quiet(*CHATTY):
            import_module("transformers.modeling_utils")
