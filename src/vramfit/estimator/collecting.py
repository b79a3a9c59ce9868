"""Python's garbage collector, paused while streams are made and replayed.

Replaying makes tens of thousands of short-lived blocks, which would set off full collections of everything torch and
transformers hold; and a collection in the middle of a trace would decide when storages end.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_num_inside = 0
_was_enabled = True


@contextmanager
def collection_paused() -> Iterator[None]:
    """No collection inside; when the last one is out, in whatever thread, it is as before the first."""
    global _num_inside, _was_enabled
    with _lock:
        if not _num_inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside and _was_enabled:
                gc.enable()
