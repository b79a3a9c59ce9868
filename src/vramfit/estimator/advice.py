"""`advise`: which single change would save most, found by predicting each."""

from typing import Any

from vramfit.errors import VramfitError
from vramfit.estimator.predict import estimate
from vramfit.records.estimate import Advice
from vramfit.settings import KINDS, SETTINGS, find

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
    for changed in (change for setting in SETTINGS.values() for change in setting.advised(now)):
        techniques = {name: t for name, value in changed.items() if (t := find(name, value)) is not None}
        try:
            then = estimate(model, **{**keywords, **changed})
        except VramfitError:
            continue  # this model or GPU does not have it
        saved = now.peak_allocated_bytes - then.peak_allocated_bytes
        if saved >= MIN_SAVED_SHARE * now.peak_allocated_bytes:
            found.append(
                Advice(
                    change=", ".join(f"{name} {changed[name]}" for name in techniques),
                    kind=max((t.kind for t in techniques.values()), key=KINDS.index),
                    saved_bytes=saved,
                    peak_allocated_bytes=then.peak_allocated_bytes,
                    fits=then.fits,
                )
            )
    return sorted(found, key=lambda a: -a.saved_bytes)
