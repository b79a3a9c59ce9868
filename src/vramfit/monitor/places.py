"""Where in the user's code something happens: file and line, the variable, the module; and where memory ran out."""

import inspect
import linecache
import os
import re
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, ModuleType, TracebackType
from typing import Any

import torch

from vramfit.records.watch import OutOfMemoryReport, WatchPhase

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
MAX_FRAMES = 60
MAX_ITEMS = 10_000
MAX_KEYS = 100
CONTAINERS = (list, tuple, deque)
_ASKED = re.compile(r"Tried to allocate ([0-9]{1,12}(?:\.[0-9]{1,4})?) ([KMG]iB|bytes|B)\b")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to vramfit, and not to the user."""
    if filename.startswith((_PACKAGE, _TORCH, _STDLIB, "<frozen")):
        return True
    return f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename


def user_frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Frames of the user's own code, innermost first."""
    for outer in islice(all_frames(frame or sys._getframe(1)), MAX_FRAMES):
        if not is_library(outer.f_code.co_filename):
            yield outer


def user_line(frame: FrameType | None = None) -> str:
    """file:line of the user's code that led here; empty where there is none, as in autograd's threads."""
    found = next(user_frames(frame or sys._getframe(1)), None)
    return place(found.f_code.co_filename, found.f_lineno) if found is not None else ""


def warn_user(text: str) -> None:
    """Warn, with the line of the user's code that led here as the place."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(text, stacklevel=level if frame is None else level + 1)


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


def all_frames(frame: FrameType) -> Iterator[FrameType]:
    """From a frame outwards."""
    return (outer for outer, _ in walk_stack(frame))


def module_name(module: torch.nn.Module, root: torch.nn.Module | None) -> str:
    """A module's path below its root, or its class."""
    if root is None or module is root:
        return type(module).__name__
    path = next((name for name, found in root.named_modules() if found is module), None)
    return type(module).__name__ if path is None else path


def first_line(error: BaseException) -> str:
    """An error's own words, in one line."""
    text = str(error).strip()
    return text.splitlines()[0][:600] if text else type(error).__name__


def requested_bytes(error: BaseException) -> int | None:
    """What was asked for, where the message says so."""
    found = _ASKED.search(first_line(error))
    return int(float(found[1]) * _UNITS.get(found[2], 1)) if found else None


def frames_of(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Frames of a traceback with the line each was at, innermost first."""
    return list(walk_tb(trace))[::-1]


def source_of(frames: list[tuple[FrameType, int]]) -> str:
    """file:line of the innermost frame of the user's own."""
    own = ((f, line) for f, line in frames if not is_library(f.f_code.co_filename))
    found = next(own, None)
    return place(found[0].f_code.co_filename, found[1]) if found is not None else ""


def module_of(frames: list[tuple[FrameType, int]], model: torch.nn.Module | None) -> str:
    """Path of the innermost module whose code was running."""
    owners = (locals_of(frame).get("self") for frame, _ in frames)
    running = next((owner for owner in owners if issubclass(type(owner), torch.nn.Module)), None)
    return "" if running is None else module_name(running, model)


def remedies_without_a_model(report: OutOfMemoryReport) -> Iterator[str]:
    """What can be said without knowing the job."""
    held, reserved, asked = report.allocated_bytes, report.reserved_bytes, report.requested_bytes
    if (
        held is not None
        and reserved is not None
        and asked is not None
        and reserved - held >= max(asked, reserved // 10)
    ):
        yield ("much is reserved and in no tensor: PYTORCH_ALLOC_CONF=expandable_segments:True keeps it in one piece")
    yield from _by_phase(report.phase)


def _by_phase(phase: WatchPhase) -> Iterator[str]:
    if phase == "evaluation":
        yield "a smaller evaluation batch under torch.no_grad(), with outputs moved to the CPU batch by batch"
    elif phase == "optimizer":
        yield "AdamW(fused=True) makes no temporary copies at the step; 8-bit state (torchao) takes a quarter"
    elif phase in ("forward", "backward"):
        yield "half the samples a pass and two passes a step: the same gradient for half the activations"
    elif phase == "load":
        yield "load in the precision it will run in: vramfit.load(…, precision=…) holds one tensor twice at most"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSeen:
    """The last call of a model."""

    model: torch.nn.Module | None = None
    """The model itself, if it still lives."""
    batch: int | None = None
    """Samples of the pass."""
    seq: int | None = None
    """Tokens of a sequence."""
    autocast: torch.dtype | None = None
    """What autocast computes in; None where it is off."""


def see_job(inputs: dict[str, Any]) -> JobSeen:
    """Batch and length from the first input that has both, the model left out."""
    tokens = next((v for v in inputs.values() if isinstance(v, torch.Tensor) and v.dim() >= 2), None)
    if tokens is None:
        return JobSeen()
    kind = tokens.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return JobSeen(batch=tokens.shape[0], seq=tokens.shape[1], autocast=autocast)
