"""`advise`: which single change would save most, found by predicting each."""

from collections.abc import Iterator
from typing import Any, Literal

from vramfit.errors import VramfitError
from vramfit.estimator.predict import estimate
from vramfit.records.estimate import Advice, Estimate

Kind = Literal["free", "numeric", "different training"]
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
    for change, kind, changed in _candidates(now):
        try:
            then = estimate(model, **(keywords | changed))
        except VramfitError:
            continue  # this model or GPU does not have it
        saved = now.peak_allocated_bytes - then.peak_allocated_bytes
        if saved >= MIN_SAVED_SHARE * now.peak_allocated_bytes:
            found.append(
                Advice(
                    change=change,
                    kind=kind,
                    saved_bytes=saved,
                    peak_allocated_bytes=then.peak_allocated_bytes,
                    fits=then.fits,
                )
            )
    return sorted(found, key=lambda a: -a.saved_bytes)


def _candidates(now: Estimate) -> Iterator[tuple[str, Kind, dict[str, Any]]]:
    w = now.workload
    if w.attention == "eager":
        yield "attention sdpa", "free", {"attention": "sdpa"}
    if w.trains and w.optimizer == "adamw":
        yield "optimizer adamw-fused", "free", {"optimizer": "adamw-fused"}
    if w.mode != "infer" and w.checkpointing != "full":
        yield "checkpointing full", "free", {"checkpointing": "full"}
    if w.trains and w.batch % 2 == 0 and (w.micro_batch or 1) % 2 == 0:
        accumulate = 2 * (w.accumulate or 1)
        yield f"accumulate {accumulate}", "free", {"accumulate": accumulate, "micro_batch": None}
    if w.precision in ("fp32", "tf32"):
        bf16 = now.compute_capability >= (8, 0)
        lower = ("amp-bf16" if bf16 else "amp-fp16") if w.mode != "infer" else ("bf16" if bf16 else "fp16")
        yield f"precision {lower}", "numeric", {"precision": lower}
    if w.trains and w.freeze is None:
        yield "freeze embeddings", "different training", {"freeze": "embeddings"}
