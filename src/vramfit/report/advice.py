"""Advice for the terminal: each change by itself, what it saves, and whether that is enough."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from vramfit.records.estimate import Advice, Estimate
from vramfit.report.words import size

MAX_EACH = 4
KINDS = {
    "free": "The same maths",
    "numeric": "The same job in another precision",
    "different training": "Different training: something else is learned",
}
AT_PART = {"optimizer": " at the step", "forward": " in forward", "backward": " in backward"}


def render_advice(advice: Sequence[Advice], estimate: Estimate) -> RenderableType:
    """Changes by what they cost, in each kind the most saved first; the best of all stands out."""
    saving = [a for a in advice if a.saved_bytes > 0]
    if not saving:
        return Text("No single change makes the peak smaller.")
    best = max(saving, key=lambda a: a.saved_bytes)
    when = AT_PART.get(estimate.peak.part, "")
    lines = [Text("What one change would save", style="bold")]
    for kind, title in KINDS.items():
        of_kind = [a for a in saving if a.kind == kind][:MAX_EACH]
        if of_kind:
            lines.append(Text(title, style="dim"))
        for change in of_kind:
            name = f"  {change.change:<{max(len(a.change) for a in saving)}}"
            saved = f"  saves {size(change.saved_bytes):>10}{when}"
            left = f"  → {size(change.peak_allocated_bytes):>10}  "
            lines.append(
                Text.assemble((name, "bold" if change is best else ""), saved, left, _verdict(change, estimate))
            )
    if any(a.change.startswith("attention packed") for a in saving):
        steps = "; training with it is for --loop stepper" if estimate.workload.trains else ""
        lines.append(Text(f"Packed attention has no mask, which takes {size(estimate.mask_bytes)} here{steps}."))
    return Group(*lines)


def _verdict(change: Advice, estimate: Estimate) -> Text:
    """Said only where the change decides: it fits now, or it still does not."""
    if change.fits is None or (change.fits and estimate.fits):
        return Text()
    return Text("✓ fits", style="green") if change.fits else Text("✗ too much", style="red")
