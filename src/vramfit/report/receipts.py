"""Receipts for the terminal: one line each, and what they say of each card."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vramfit.records.receipt import NUM_NEEDED, Receipt, measured_pairs
from vramfit.settings import chosen_in_words
from vramfit.units import counted, format_bytes
from vramfit.workload import Workload

MODEL_WIDTH = 24


def render_receipts(receipts: Sequence[Receipt]) -> RenderableType:
    """A table of receipts, and how many speak for each card."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2))
    for name in ("card", "torch", "job", "allocated", "off by", "reserved", "off by", "step", "predicted", ""):
        table.add_column(name, justify="left" if name in ("card", "torch", "job", "") else "right")
    for receipt in receipts:
        table.add_row(*_row(receipt))
    return Group(table, *_verdicts(receipts))


def _row(r: Receipt) -> list[str]:
    workload = Workload.from_keywords(model=r.model, **r.settings)
    words = ", ".join([f"{workload.batch} × {workload.seq}", *chosen_in_words(workload)])
    mark = "emulated" if r.is_emulated else "ran out" if r.ran_out else "" if r.agrees else "differs"
    return [
        r.gpu,
        ".".join(map(str, r.torch_release)),
        f"{r.kind} {r.model[:MODEL_WIDTH]} {words}",
        format_bytes(r.measured.allocated_bytes),
        _off(r, "allocated"),
        format_bytes(r.measured.reserved_bytes),
        _off(r, "reserved"),
        _seconds(r.measured.step_time_s),
        _seconds(r.predicted.step_time_s),
        mark,
    ]


def _off(r: Receipt, figure: str) -> str:
    """How far a prediction was off; nothing where the CPU's kernels ran, which take other temporaries."""
    return "–" if r.is_emulated else f"{100 * r.error(figure):+.2f} %"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s"


def _verdicts(receipts: Sequence[Receipt]) -> list[RenderableType]:
    """One line a card and torch release."""
    measured, lines = measured_pairs(receipts), []
    real = [r for r in receipts if not r.is_emulated and r.compute_capability is not None]
    for capability, release in sorted({(r.compute_capability or (0, 0), r.torch_release) for r in real}):
        of_pair = [r for r in real if (r.compute_capability, r.torch_release) == (capability, release)]
        name = f"sm_{capability[0]}{capability[1]} with torch {release[0]}.{release[1]}"
        differ = sum(not r.agrees for r in of_pair)
        if (release, capability) in measured:
            said = f"measured: {counted(measured[release, capability], 'job')} agree"
        elif differ:
            said = f"not measured: {differ} of {counted(len(of_pair), 'receipt')} differ from the prediction"
        else:
            said = (
                f"not measured yet: {counted(len(of_pair), 'receipt')}, and {NUM_NEEDED} of different jobs are needed"
            )
        lines.append(Text(f"{name}: {said}."))
    num_emulated = len(receipts) - len(real)
    if num_emulated:
        lines.append(Text(f"{counted(num_emulated, 'receipt')} of the emulated GPU: no proof about a card."))
    return [Text(), *lines] if lines else []
