"""`vramfit max-batch`: the largest batch that fits."""

import typer

from vramfit.cli.progress import working
from vramfit.cli.terminal import Json, console, print_json
from vramfit.cli.workload_options import WorkloadOptions, takes_workload

EXAMPLE = "vramfit max-batch bert-large-uncased --seq 512 --precision amp-fp16 --gpu t4"
DOES_NOT_FIT = 3


@takes_workload(without=("batch", "micro_batch", "lengths"))
def run(options: WorkloadOptions, json: Json = False) -> None:
    """Find the largest batch that fits, what stops the next one, and which smaller ones do not fit.

    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when not even one sample fits.
    """
    from vramfit.report.sizes import render_max_batch

    keywords = options.keywords()
    with working(f"Searching the largest batch of {options.model}"):
        from vramfit.planner.largest import max_batch

        found = max_batch(options.model, **keywords)
    if json:
        print_json(found)
    else:
        console().print(render_max_batch(found))
    if not found.batch:
        raise typer.Exit(DOES_NOT_FIT)
