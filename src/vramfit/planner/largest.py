"""`max_batch`: the largest batch that fits, and the largest that leaves the margin that plans keep."""

from dataclasses import replace
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.estimator import search
from vramfit.planner.margin import margin_of
from vramfit.records.estimate import MaxBatch
from vramfit.settings import usual_precision


def max_batch(model: Any, **keywords: Any) -> MaxBatch:
    """The largest effective batch that fits the GPU or the memory given.

    What the tensors ask for grows with the batch and bounds it from above. From there down every batch is replayed
    inside the capacity until one fits wherever segments are put: that is `batch`. `margin_batch` is found in the same
    way inside what a plan would use of the capacity. Where no precision is given, `usual_batch` is the same in the
    lower one that is usual on the GPU: autocast for training.

    Args:
        model, **keywords: as for `estimate`; `gpu` or `memory` is needed, `batch` is not used.

    Raises:
        WorkloadError: no capacity given, and whatever `estimate` raises.

    >>> found = max_batch("bert-tiny", seq=128, memory="300MiB")
    >>> found.batch > found.margin_batch > 64
    True
    """
    found = search.max_batch(model, **keywords)
    e = found.estimate
    if not found.batch or e.capacity_bytes is None:
        return found
    margin = margin_of(e.capacity_bytes, e.basis, e.workload, None, varied=e.workload.mask == "padded")
    inside = {**keywords, "memory": max(e.capacity_bytes - margin.num_bytes, 1)}
    found = replace(
        found,
        margin_batch=min(search.max_batch(model, **inside).batch, found.batch),
        margin_bytes=margin.num_bytes,
        margin_reason=margin.reason,
    )
    if keywords.get("precision") is not None:
        return found
    precision = usual_precision(e.compute_capability, infers=e.workload.mode == "infer")
    try:
        batch = search.max_batch(model, **{**inside, "precision": precision}).batch
    except WorkloadError:  # something that was given does not go with it
        return found
    return replace(found, usual_precision=precision, usual_batch=batch)
