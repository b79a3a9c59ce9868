"""Answers kept on disk between processes: bounded in size, safe for several processes, and made again where damaged.

They are in `vramfit/answers` under `XDG_CACHE_HOME` or `~/.cache`; the environment variable `VRAMFIT_CACHE` names
another folder, or is `off`.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from vramfit.errors import VramfitError
from vramfit.records.codec import RecordError, from_json, replace_file, to_data, to_json

VARIABLE = "VRAMFIT_CACHE"
OFF = ("off", "0", "no", "false", "")
PACKAGES = ("torch", "transformers", "vramfit")
"""Their releases decide answers."""
MAX_BYTES = 64 * 2**20
"""What all answers may take; when there is more, those that were not asked for the longest go."""
KEPT_SHARE = 0.75
MAX_ANSWER_BYTES = 4 * 2**20

T = TypeVar("T")


def folder() -> Path | None:
    """Where answers are kept; None where nothing is."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return None if given.strip().lower() in OFF else Path(given).expanduser()
    return user_folder("answers")


def user_folder(name: str) -> Path:
    """A folder of vramfit in the user's cache: under `XDG_CACHE_HOME`, or `~/.cache` where that is no absolute path."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
    return home / "vramfit" / name


def remembered(kind: type[T], question: Any, make: Callable[[], T]) -> T:
    """The answer to a question that was asked before, in this process or another; else made now, and kept.

    Args:
        kind: the record that answers it.
        question: everything that decides the answer besides releases and vramfit's own code.
        make: answers it.
    """
    place = folder()
    if place is None:
        return make()
    path = place / f"{_digest(kind, question)}.json"
    found = _read(kind, path)
    if found is None:
        found = make()
        _keep(path, to_json(found, indent=None).encode())
    return found


def _digest(kind: type, question: Any) -> str:
    whole = [kind.__name__, _stamp(), to_data(question)]
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=repr).encode()).hexdigest()


@cache
def _stamp() -> list[Any]:
    """What changes with Python, the packages that answers rest on, and any file of vramfit."""
    root = Path(__file__).parent
    files = sorted((str(path.relative_to(root)), path.stat()) for path in root.rglob("*.*") if path.suffix != ".pyc")
    code = hashlib.sha256(repr([(name, s.st_size, s.st_mtime_ns) for name, s in files]).encode()).hexdigest()
    return [sys.version, *map(_release, PACKAGES), code]


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _read(kind: type[T], path: Path) -> T | None:
    """A kept answer; None where there is none that can be read."""
    try:
        if path.stat().st_size > MAX_ANSWER_BYTES:
            return None
        found = from_json(kind, path.read_text(encoding="utf-8"))
        os.utime(path)  # it was asked for now
    except (OSError, RecordError, ValueError, TypeError):
        return None
    return found


def _keep(path: Path, content: bytes) -> None:
    """Write an answer whole; where that cannot be, it is made again next time."""
    if len(content) > MAX_ANSWER_BYTES:
        return
    with suppress(OSError, VramfitError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, content)
        _shrink(path.parent)


def _shrink(place: Path) -> None:
    """Keep the folder within its bound; another process may take files away meanwhile."""
    found = []
    for path in place.glob("*.json"):
        with suppress(OSError):
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    total = sum(size for _, size, _ in found)
    if total <= MAX_BYTES:
        return
    for _, size, path in sorted(found, key=lambda each: each[0]):
        with suppress(OSError):
            path.unlink()
        total -= size
        if total <= KEPT_SHARE * MAX_BYTES:
            return
