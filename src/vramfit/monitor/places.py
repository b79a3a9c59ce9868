"""Where in the user's code something happens: file and line, the variable that holds it, the module that runs."""

import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
MAX_FRAMES = 60
MAX_ITEMS = 10_000
MAX_KEYS = 100
CONTAINERS = (list, tuple, deque)


@lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to vramfit, and not to the user."""
    if filename.startswith((_PACKAGE, _TORCH, _STDLIB, "<frozen")):
        return True
    return f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename


def user_frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Frames of the user's own code, innermost first."""
    frame = frame or sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        if not is_library(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def user_line(frame: FrameType | None = None) -> str:
    """file:line of the user's code that led here; empty where there is none, as in autograd's threads."""
    found = next(user_frames(frame or sys._getframe(1)), None)
    return place(found.f_code.co_filename, found.f_lineno) if found is not None else ""


def place(filename: str, line: int) -> str:
    """file:line, with the path from here where it lies below."""
    path = os.path.relpath(filename) if filename.startswith(os.getcwd() + os.sep) else filename
    return f"{path}:{line}"


def locals_of(frame: FrameType) -> dict[str, Any]:
    """A frame's variables, leaving nothing behind.

    Before Python 3.13 a frame that was asked keeps a copy of its variables, and with them tensors that the code
    itself has dropped: the copy is emptied again.
    """
    shown = frame.f_locals
    names = dict(shown)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.gettrace() is None:
        shown.clear()
    return names


def variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """What a frame's code can name: its variables, and what its `self` keeps."""
    names = locals_of(frame)
    yield from names.items()
    owner = names.get("self")
    if owner is not None and not issubclass(type(owner), torch.nn.Module):
        kept = getattr(owner, "__dict__", None)
        for name, value in list(kept.items()) if type(kept) is dict else ():
            yield f"self.{name}", value


def tensors_in(value: Any, *, depth: int = 2) -> Iterator[torch.Tensor]:
    """Tensors of a value that may be one, or a container of some.

    Types are asked, not values: a proxy in somebody's variables may do anything when asked for its class.
    """
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        yield value
    elif depth and issubclass(kind, dict):
        for item in islice(list(value.values()), MAX_ITEMS):
            yield from tensors_in(item, depth=depth - 1)
    elif depth and issubclass(kind, CONTAINERS):
        for item in islice(value, MAX_ITEMS):
            yield from tensors_in(item, depth=depth - 1)


def containers_in(name: str, value: Any, *, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """A value and what lies inside it that is a tensor or can hold some, each with the words that lead to it.

    Into dictionaries and plain objects only: what lies in a list has no name.
    """
    kind = type(value)
    if issubclass(kind, (*CONTAINERS, torch.Tensor)):
        yield name, value
    elif issubclass(kind, dict):
        yield name, value
        for key, item in islice(list(value.items()), MAX_KEYS) if depth else ():
            if isinstance(key, str):
                yield from containers_in(f"{name}[{key!r}]", item, depth=depth - 1)
    elif depth and not issubclass(kind, (type, ModuleType, torch.nn.Module)):
        kept = getattr(value, "__dict__", None)
        for key, item in islice(list(kept.items()), MAX_KEYS) if type(kept) is dict else ():
            yield from containers_in(f"{name}.{key}", item, depth=depth - 1)


def line_that_fills(frame: FrameType, name: str) -> str | None:
    """file:line in a frame's function where a variable is added to; None where no such line is found."""
    code = frame.f_code
    word = re.escape(name).replace("'", "[\"']")
    pattern = re.compile(rf"(?<![\w.]){word}\s*(?:\.(?:append|extend|add)\(|\[[^]]*\]\s*=|\+=|=\s*{word}\b)")
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    last = max((n for _, _, n in code.co_lines() if n is not None), default=code.co_firstlineno)
    for number in range(code.co_firstlineno, min(last, len(lines)) + 1):
        if pattern.search(lines[number - 1]):
            return place(code.co_filename, number)
    return None


def modules_on(frames: Iterator[FrameType]) -> list[torch.nn.Module]:
    """Modules whose forward runs, outermost last, found by the `self` of the frames."""
    found: list[torch.nn.Module] = []
    for frame in frames:
        owner = locals_of(frame).get("self")
        if owner is not None and issubclass(type(owner), torch.nn.Module) and (not found or found[-1] is not owner):
            found.append(owner)
    return found


def all_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """From a frame outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_name(module: torch.nn.Module, root: torch.nn.Module | None) -> str:
    """A module's path below its root, or its class."""
    if root is None or module is root:
        return type(module).__name__
    path = next((name for name, found in root.named_modules() if found is module), None)
    return type(module).__name__ if path is None else path
