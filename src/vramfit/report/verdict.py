"""Whether it fits, as plain sentences: for pages, notebooks and messages."""

from dataclasses import dataclass
from typing import Literal

from vramfit.records.estimate import Estimate
from vramfit.units import format_bytes

Tone = Literal["good", "tight", "bad", "open"]
TIGHT_SHARE = 0.03
"""Less than this share of the capacity to spare is called tight."""
COLD = "Only where cuBLAS was used before: run one small matrix product before the model comes to the GPU."


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The answer, in one line and a few more."""

    tone: Tone
    headline: str
    details: tuple[str, ...]


def verdict_of(estimate: Estimate) -> Verdict:
    """Whether it fits, by how much, and in what."""
    free, capacity = estimate.free_bytes, estimate.capacity_bytes
    most = format_bytes(estimate.safe_reserved_bytes)
    if free is None or capacity is None or estimate.fits is None:
        text = f"At most {most} reserved. No GPU and no amount of memory is given, so whether it fits is left open."
        return Verdict(tone="open", headline=f"Takes {format_bytes(estimate.peak_process_bytes)}", details=(text,))
    room = f"{format_bytes(capacity)}{_on_gpu(estimate)}"
    if not estimate.fits:
        why = f"{format_bytes(-free)} too much" if free < 0 else "memory is too fragmented"
        return Verdict(tone="bad", headline=f"Does not fit: {why}", details=(f"{most} to reserve in {room}.",))
    details = [f"At most {most} reserved of {room}."]
    if estimate.num_retries:
        times = "once" if estimate.num_retries == 1 else f"{estimate.num_retries} times"
        details.append(f"The allocator must empty its cache {times} to stay inside, which costs time.")
    if estimate.fits_cold is False:
        details.append(COLD)
    is_tight = bool(len(details) > 1 or free < TIGHT_SHARE * capacity)
    spare = f"{format_bytes(free)} to spare" if free > 0 else "nothing to spare"
    return Verdict(tone="tight" if is_tight else "good", headline=f"Fits, with {spare}", details=tuple(details))


def _on_gpu(estimate: Estimate) -> str:
    if estimate.total_memory_bytes is None or estimate.workload.memory is not None:
        return ""
    context = format_bytes(estimate.context_bytes, digits=0)
    return f" ({estimate.gpu}: {format_bytes(estimate.total_memory_bytes)}, CUDA takes {context})"
