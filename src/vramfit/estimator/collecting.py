"""Python's garbage collector, paused while streams are made and replayed.

Replaying makes tens of thousands of short-lived blocks, which would set off full collections of everything torch and
transformers hold; and a collection in the middle of a trace would decide when storages end.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """No collection inside; afterwards as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
