"""Leaks from step to step, as findings: one for each line of the user's code that leaves tensors behind."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from vramfit.monitor.ledger import Leak
from vramfit.records.watch import MemoryFinding, WatchPhase
from vramfit.units import format_bytes

MIN_BYTES_A_ROUND = 1024


def leak_findings(leaks: Iterable[Leak]) -> Iterator[tuple[WatchPhase, MemoryFinding]]:
    """One finding a line, with the phase in which most of it was made."""
    by_line: dict[str, list[Leak]] = defaultdict(list)
    for leak in leaks:
        by_line[leak.origin.source].append(leak)
    for source, found in by_line.items():
        num_bytes = sum(leak.num_bytes for leak in found)
        rounds = max(leak.num_rounds for leak in found)
        if num_bytes < MIN_BYTES_A_ROUND * rounds:
            continue
        worst = max(found, key=lambda leak: leak.num_bytes)
        unit = "batch" if worst.origin.phase == "evaluation" else "step"
        finding = MemoryFinding(
            check="watch.leak",
            module=worst.origin.module,
            source=source,
            num_bytes=num_bytes,
            what=f"tensors made by {worst.origin.operator} stay alive from every {unit}: "
            f"{format_bytes(num_bytes // rounds)} a {unit}, {format_bytes(num_bytes)} so far "
            f"({sum(leak.num_tensors for leak in found)} tensors of {rounds})",
            why=_why(worst),
            fix=_fix(worst),
        )
        yield worst.origin.phase, finding


def _why(leak: Leak) -> str:
    if leak.origin.phase in ("forward", "evaluation"):
        return "something holds on to it: a list, an attribute, a closure, or an output whose graph was never freed"
    return "something holds on to it after the step is over"


def _fix(leak: Leak) -> str:
    if leak.origin.phase == "evaluation":
        return "torch.no_grad() around the pass, and .cpu() on what is kept"
    return "keep .item(), .detach().cpu() or nothing of it; clear what collects it after each step"
