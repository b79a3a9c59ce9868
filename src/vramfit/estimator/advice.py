"""`advise`: which single change would save most, found by predicting each."""

from collections.abc import Iterator
from typing import Any

from vramfit.errors import VramfitError
from vramfit.estimator.predict import estimate
from vramfit.records.estimate import Advice, Estimate
from vramfit.techniques.catalogue import find, usual_precision

MIN_SAVED_SHARE = 0.005
"""Changes that save less than this share of the peak are not worth a line."""


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
        technique = find(keyword, changed[keyword])
        assert technique is not None, f"{keyword} {changed[keyword]} is not in the catalogue"
        try:
            then = estimate(model, **(keywords | changed))
        except VramfitError:
            continue  # this model or GPU does not have it
        saved = now.peak_allocated_bytes - then.peak_allocated_bytes
        if saved >= MIN_SAVED_SHARE * now.peak_allocated_bytes:
            found.append(
                Advice(
                    change=f"{keyword} {changed[keyword]}",
                    kind=technique.kind,
                    saved_bytes=saved,
                    peak_allocated_bytes=then.peak_allocated_bytes,
                    fits=then.fits,
                )
            )
    return sorted(found, key=lambda a: -a.saved_bytes)


def _candidates(now: Estimate) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keywords to change, the technique first; a second one follows from it."""
    w = now.workload
    if w.attention == "eager":
        yield "attention", {"attention": "sdpa"}
    if w.trains and w.optimizer == "adamw":
        yield "optimizer", {"optimizer": "adamw-fused"}
    if w.mode != "infer" and w.checkpointing != "full":
        yield "checkpointing", {"checkpointing": "full"}
    if w.trains and w.batch % 2 == 0 and (w.micro_batch or 1) % 2 == 0:
        yield "accumulate", {"accumulate": 2 * (w.accumulate or 1), "micro_batch": None}
    if w.precision in ("fp32", "tf32"):
        yield "precision", {"precision": usual_precision(now.compute_capability, infers=w.mode == "infer")}
    if w.trains and w.freeze is None and w.lora is None:
        yield "freeze", {"freeze": "embeddings"}
