"""`advise`: which single change would save most, found by predicting each."""

from collections.abc import Iterator
from typing import Any

from vramfit.errors import VramfitError
from vramfit.estimator.predict import estimate
from vramfit.records.estimate import Advice, Estimate
from vramfit.settings import KINDS, find, usual_precision

MIN_SAVED_SHARE = 0.005
"""Changes that save less than this share of the peak are not worth a line."""
SAID = ("attention", "optimizer", "checkpointing", "accumulate", "precision", "freeze")
"""Keywords that name a change; others only make it possible."""


def advise(model: Any, **keywords: Any) -> list[Advice]:
    """Single changes that lower the allocated peak, most saved first.

    Args:
        model, **keywords: as for `estimate`.

    Raises:
        VramfitError: whatever `estimate` raises for the workload itself.
    """
    now = estimate(model, **keywords)
    found = []
    for keyword, changed in _candidates(now):
        techniques = [find(name, value) for name, value in changed.items()]
        assert techniques[0] is not None, f"{keyword} {changed[keyword]} is not in the catalogue"
        try:
            then = estimate(model, **(keywords | changed))
        except VramfitError:
            continue  # this model or GPU does not have it
        saved = now.peak_allocated_bytes - then.peak_allocated_bytes
        if saved >= MIN_SAVED_SHARE * now.peak_allocated_bytes:
            found.append(
                Advice(
                    change=", ".join(f"{name} {changed[name]}" for name in changed if name in SAID),
                    kind=max((t.kind for t in techniques if t is not None), key=KINDS.index),
                    saved_bytes=saved,
                    peak_allocated_bytes=then.peak_allocated_bytes,
                    fits=then.fits,
                )
            )
    return sorted(found, key=lambda a: -a.saved_bytes)


def _candidates(now: Estimate) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keywords to change, the technique first; others follow from it."""
    w = now.workload
    if not w.is_packed and now.has_large_mask:
        lower = {"precision": usual_precision(now.compute_capability, infers=w.mode == "infer")}
        needed = lower if w.is_32_bit else {}  # its kernel computes in 16 bits
        yield "attention", {"attention": "packed", **needed, **({"loop": "stepper"} if w.trains else {})}
    if w.attention == "eager":
        yield "attention", {"attention": "sdpa"}
    if w.trains and w.optimizer == "adamw":
        yield "optimizer", {"optimizer": "adamw-fused"}
    if w.mode != "infer" and not w.is_fully_checkpointed:
        yield "checkpointing", {"checkpointing": "full"}
    if w.trains and w.batch % 2 == 0 and (w.micro_batch or 1) % 2 == 0:
        yield "accumulate", {"accumulate": 2 * w.num_passes, "micro_batch": None}
    if w.is_32_bit:
        yield "precision", {"precision": usual_precision(now.compute_capability, infers=w.mode == "infer")}
    if w.trains and not w.is_frozen and not w.has_adapters:
        yield "freeze", {"freeze": "embeddings"}
