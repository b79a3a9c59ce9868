"""What a plan leaves free of the budget, and why; and `max_batch`, which leaves the same."""

from dataclasses import dataclass, replace
from typing import Any

from vramfit.errors import WorkloadError
from vramfit.estimator import search
from vramfit.estimator.resolve import is_measured
from vramfit.planner.heuristics import BASIS_SHARE, LEAST_FOR_LENGTHS, LEAST_SHARE, LENGTHS_SHARE
from vramfit.records.estimate import MaxBatch
from vramfit.settings import SETTINGS, lowered
from vramfit.units import format_bytes
from vramfit.workload import Workload

WORDS = {
    "verified": "this GPU and torch were compared with measurements",
    "derived": "rules are carried over to this GPU",
    "outside": "nothing is promised for this GPU or this torch",
}
OTHER_TORCH = "rules are carried over to this torch"
"""Of a GPU that was measured with another one."""


@dataclass(frozen=True, slots=True)
class Margin:
    """Bytes left free on purpose."""

    num_bytes: int
    reason: str
    is_tight: bool = False
    """Whether nothing of it is for batches of varied lengths."""
    is_thin: bool = False
    """Whether what is for them is less than was seen to be enough everywhere, or nothing."""


def _why(basis: str, workload: Workload) -> str:
    if basis != "derived":
        return WORDS[basis]
    few = [s.few_measured for name, s in SETTINGS.items() if s.few_measured and getattr(workload, name)]
    if few:
        return few[0]
    is_known = workload.gpu is not None and workload.num_gpus == 1 and is_measured(workload.gpu)
    return OTHER_TORCH if is_known else WORDS[basis]


def tight_margin_of(budget_bytes: int, basis: str, workload: Workload) -> Margin:
    """The least that is left where the usual margin leaves no plan: what predictions may be off."""
    num_bytes = int(BASIS_SHARE[basis] * budget_bytes)
    most = f"only {format_bytes(num_bytes)} stay free, since no settings of this kind leave more"
    why = f"{BASIS_SHARE[basis]:.0%} since {_why(basis, workload)}, and nothing for batches of varied lengths"
    return Margin(num_bytes, f"{most}: {why}", is_tight=True, is_thin=True)


def given_margin(budget_bytes: int, given: float | int) -> Margin:
    """The margin that the user gives, a share of the budget or bytes."""
    num_bytes = int(given * budget_bytes) if given < 1 else int(given)
    return Margin(num_bytes, f"{format_bytes(num_bytes)} stay free, as asked for")


def margin_of(budget_bytes: int, basis: str, workload: Workload, *, varied: bool, whole: bool = False) -> Margin:
    """The planner's own margin of a budget.

    Args:
        basis: of the prediction.
        workload: whose allocator and mask count.
        varied: whether samples differ in length.
        whole: whether small budgets keep as much for lengths as others: what was not measured inside them.
    """
    basis_share = BASIS_SHARE[basis]
    num_bytes = int(basis_share * budget_bytes)
    why, is_thin = f"{basis_share:.0%} since {_why(basis, workload)}", False
    if varied:
        share = LENGTHS_SHARE[workload.allocator]
        least_bytes = LEAST_FOR_LENGTHS if whole else min(LEAST_FOR_LENGTHS, int(LEAST_SHARE * budget_bytes))
        for_lengths = max(int(share * budget_bytes), least_bytes)
        num_bytes += for_lengths
        words = f"{share:.0%}" if for_lengths > least_bytes else format_bytes(least_bytes)
        why += f", {words} since batches of varied lengths fragment memory"
        if share > LENGTHS_SHARE["expandable"]:
            why += f" ({LENGTHS_SHARE['expandable']:.0%} with allocator expandable)"
        is_thin = for_lengths < LEAST_FOR_LENGTHS
    return Margin(num_bytes, f"{format_bytes(num_bytes)} stay free: {why}", is_thin=is_thin)


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
    margin = margin_of(e.capacity_bytes, e.basis, e.workload, varied=e.workload.mask == "padded")
    inside = {**keywords, "memory": max(e.capacity_bytes - margin.num_bytes, 1)}
    found = replace(
        found,
        margin_batch=min(search.max_batch(model, **inside).batch, found.batch),
        margin_bytes=margin.num_bytes,
        margin_reason=margin.reason,
    )
    lower = lowered(keywords, e.compute_capability, infers=e.workload.mode == "infer")
    if not lower:
        return found
    try:
        batch = search.max_batch(model, **inside | lower).batch
    except WorkloadError:  # something that was given does not go with it
        return found
    return replace(found, usual_precision=lower.popitem()[1], usual_batch=batch)
