"""What a plan leaves free of the budget, and why."""

from dataclasses import dataclass

from vramfit.estimator.target import is_measured
from vramfit.units import format_bytes
from vramfit.workload import Workload

BASIS_SHARE = {"verified": 0.01, "derived": 0.05}
"""Of the budget: how far predictions may be off, where they were compared with a GPU and where they were not."""
LENGTHS_SHARE = {"expandable": 0.03, "default": 0.10}
"""Of the budget, for batches of varied lengths, whose blocks do not fit into each other's places. Reserved memory
after 100 windows of varied lengths, replayed: up to 3 % beyond the one of full windows with expandable segments; up to
30 % without, most of which the allocator gives back when it runs short, at the price of retries."""
LEAST_FOR_LENGTHS = 48 * 2**20
"""At least: segments grow by 20 MiB, and runs inside 1 to 2 GiB on a GPU reserved 36 to 40 MiB beyond full windows."""
LEAST_SHARE = 0.05
"""But no larger a share of a small budget: runs inside 240 to 500 MiB on a GPU reserved 2 to 14 MiB beyond (3.5 %)."""
WORDS = {
    "verified": "this GPU and torch were compared with measurements",
    "derived": "rules are carried over to this GPU",
}
COMPILED = "compiled layers were compared with few measurements"
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
    if workload.compile:
        return COMPILED
    is_known = workload.gpu is not None and workload.num_gpus == 1 and is_measured(workload.gpu)
    return OTHER_TORCH if is_known else WORDS[basis]


def tight_margin_of(budget_bytes: int, basis: str, workload: Workload) -> Margin:
    """The least that is left where the usual margin leaves no plan: what predictions may be off."""
    num_bytes = int(BASIS_SHARE[basis] * budget_bytes)
    most = f"only {format_bytes(num_bytes)} stay free, since no settings of this kind leave more"
    why = f"{BASIS_SHARE[basis]:.0%} since {_why(basis, workload)}, and nothing for batches of varied lengths"
    return Margin(num_bytes, f"{most}: {why}", is_tight=True, is_thin=True)


def margin_of(
    budget_bytes: int,
    basis: str,
    workload: Workload,
    given: float | int | None,
    *,
    varied: bool,
    whole: bool = False,
) -> Margin:
    """The margin of a budget.

    Args:
        basis: of the prediction.
        workload: whose allocator and mask count.
        given: a share or bytes, where the user says.
        varied: whether samples differ in length.
        whole: whether small budgets keep as much for lengths as others: what was not measured inside them.
    """
    if given is not None:
        num_bytes = int(given * budget_bytes) if given < 1 else int(given)
        return Margin(num_bytes, f"{format_bytes(num_bytes)} stay free, as asked for")
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
