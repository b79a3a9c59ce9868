"""What was running when memory ran out: the job as the watch saw it, and the error's traceback."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch

from vramfit.monitor.places import is_library, module_name, modules_on, place
from vramfit.records.watch import OutOfMemoryReport, WatchPhase

_ASKED = re.compile(r"Tried to allocate ([0-9]{1,12}(?:\.[0-9]{1,4})?) ([KMG]iB|bytes|B)\b")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


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
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found[::-1]


def source_of(frames: list[tuple[FrameType, int]]) -> str:
    """file:line of the innermost frame of the user's own."""
    own = ((f, line) for f, line in frames if not is_library(f.f_code.co_filename))
    found = next(own, None)
    return place(found[0].f_code.co_filename, found[1]) if found is not None else ""


def module_of(frames: list[tuple[FrameType, int]], model: torch.nn.Module | None) -> str:
    """Path of the innermost module whose code was running."""
    modules = modules_on(frame for frame, _ in frames)
    return module_name(modules[0], model) if modules else ""


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
