"""`FitGrid`: what fits over batches and lengths."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FitGrid:
    """The same job at several batches and lengths."""

    micro_batches: tuple[int, ...]
    """Samples a forward pass sees, ascending."""
    seqs: tuple[int, ...]
    """Tokens a sequence, ascending."""
    safe_reserved_bytes: tuple[tuple[int, ...], ...]
    """For each micro-batch, for each length: the upper bound of what is reserved."""
    fits: tuple[tuple[bool | None, ...], ...]
    """Likewise whether it fits; None without a capacity."""
    capacity_bytes: int | None
