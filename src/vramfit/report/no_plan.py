"""`NoPlanFits` for the terminal: what is missing, the nearest settings, and what would do."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vramfit.errors import NoPlanFits
from vramfit.records.codec import to_data
from vramfit.report.charts import MIN_WIDTH, Meter
from vramfit.report.estimate import Sized, marked
from vramfit.report.words import job, model_name, size, target

MEANING = {
    "bf16": "weights, gradients and state in bfloat16",
    "freeze": "part of the model does not learn",
    "lora": "only adapters and the head learn",
    "int8": "frozen weights in 8 bits",
    "adafactor": "another optimizer",
    "sgd": "another optimizer, without moments",
}


def render_no_plan(failure: NoPlanFits) -> RenderableType:
    """A few lines: the shortfall, what comes nearest, and what would help."""
    best, budget = failure.best, failure.budget_bytes or 0
    w = best.workload
    room = size(budget - failure.margin_bytes)
    asked = f"batch {w.batch:,} × {w.seq:,} tokens · {target(best)} · budget {size(budget)}"
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(ratio=1, min_width=MIN_WIDTH)
    used = best.safe_reserved_bytes
    for name, value in (("the least it takes", used), ("what there is", budget - failure.margin_bytes)):
        bar = Meter(value=value, limit=max(budget - failure.margin_bytes, 1), scale=max(used, budget))
        grid.add_row(f"  {name}", Text(size(value), "bold"), bar)
    parts: list[RenderableType] = [
        Text.assemble((model_name(w.model), "bold"), f" · {w.task} · training plan"),
        Text(asked, style="dim"),
        Text(),
        Text(f"✗ No plan fits: {size(failure.shortfall_bytes)} too little.", style="bold red"),
        grid,
        Text(f"  {room} are left of {size(budget)} after a margin of {size(failure.margin_bytes)}.", style="dim"),
        Text(),
        Text("Nearest settings", style="bold"),
        Text(f"  {', '.join(job(w)[1:])}"),
        Text(),
        Text("What would do, each predicted", style="bold"),
        *_remedies(failure),
    ]
    return Sized(parts)


def _remedies(failure: NoPlanFits) -> Iterator[RenderableType]:
    if failure.allow:
        meaning = "; ".join(MEANING.get(name, name) for name in failure.allow)
        yield marked("→", f"--allow {','.join(failure.allow)}   the mildest change that fits: {meaning}", "cyan")
    else:
        yield marked("·", "No change of the training that vramfit knows would fit.", "dim")
    if failure.host_bytes:
        yield marked("→", f"{size(failure.host_bytes)} of host memory   for what need not stay on the GPU", "cyan")
    if failure.gpu:
        yield marked("→", f"--gpu {failure.gpu}   the smallest GPU of the catalogue on which this fits", "cyan")
    if failure.model:
        yield marked("→", f"{failure.model}   the largest model of the family that fits here", "cyan")


def no_plan_data(failure: NoPlanFits) -> dict[str, Any]:
    """For `--json`."""
    return {
        "error": str(failure),
        "shortfall_bytes": failure.shortfall_bytes,
        "budget_bytes": failure.budget_bytes,
        "margin_bytes": failure.margin_bytes,
        "allow": list(failure.allow),
        "gpu": failure.gpu,
        "model": failure.model,
        "host_bytes": failure.host_bytes,
        "best": to_data(failure.best),
    }
