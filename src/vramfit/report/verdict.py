"""Whether it fits, as plain sentences: for the terminal, pages, notebooks and messages."""

from collections.abc import Iterator
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
    facts: tuple[str, ...]
    """What the answer rests on."""
    warnings: tuple[str, ...] = ()
    """What it depends on, or costs."""

    @property
    def details(self) -> tuple[str, ...]:
        """Every line below the headline."""
        return (*self.facts, *self.warnings)


def verdict_of(estimate: Estimate, what: str = "Does not fit") -> Verdict:
    """Whether it fits, by how much, and in what; `what` words that it does not."""
    free, capacity = estimate.free_bytes, estimate.capacity_bytes
    most = format_bytes(estimate.safe_reserved_bytes)
    if free is None or capacity is None or estimate.fits is None:
        text = f"At most {most} reserved. No GPU and no amount of memory is given, so whether it fits is left open."
        return Verdict(tone="open", headline=f"Takes {format_bytes(estimate.peak_process_bytes)}", facts=(text,))
    host, limit = estimate.host_bytes, estimate.workload.host_memory
    if limit is not None and host > limit:
        why = f"{format_bytes(host - limit)} too much for the host's memory"
        fact = f"{format_bytes(host)} wait there, of {format_bytes(limit)}."
        return Verdict(tone="bad", headline=f"{what}: {why}", facts=(fact,))
    capacity_words = f"{format_bytes(capacity)}{_on_gpu(estimate)}"
    if not estimate.fits:
        why = f"{format_bytes(-free)} too much" if free < 0 else "memory is too fragmented"
        return Verdict(tone="bad", headline=f"{what}: {why}", facts=(f"{most} to reserve in {capacity_words}.",))
    facts = [f"At most {most} reserved of {capacity_words}."]
    facts += [f"{format_bytes(host)} wait in host memory."] if host else []
    warnings = list(_warnings(estimate))
    is_tight = bool(warnings) or free < TIGHT_SHARE * capacity
    spare = f"{format_bytes(free)} to spare" if free > 0 else "nothing to spare"
    return Verdict(
        tone="tight" if is_tight else "good",
        headline=f"Fits, with {spare}",
        facts=tuple(facts),
        warnings=tuple(warnings),
    )


def _warnings(estimate: Estimate) -> Iterator[str]:
    if estimate.num_retries:
        times = "once" if estimate.num_retries == 1 else f"{estimate.num_retries} times"
        yield f"The allocator must empty its cache {times} to stay inside, which costs time."
    if estimate.fits_cold is False:
        yield COLD


def _on_gpu(estimate: Estimate) -> str:
    if estimate.total_memory_bytes is None or estimate.workload.memory is not None:
        return ""
    context = format_bytes(estimate.context_bytes, digits=0)
    return f" ({estimate.gpu}: {format_bytes(estimate.total_memory_bytes)}, CUDA takes {context})"
