"""`vramfit estimate`: what a job will take on a GPU, and whether it fits."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.progress import working
from vramfit.cli.terminal import Json, console, print_json
from vramfit.cli.workload_options import WorkloadOptions, takes_workload
from vramfit.stages import within

if TYPE_CHECKING:
    from vramfit.records.estimate import Advice, Estimate

EXAMPLE = "vramfit estimate bert-base-uncased --batch 8 --seq 512 --gpu t4"
DOES_NOT_FIT = 3
FIGURES = ("requested", "allocated", "reserved", "process")


@takes_workload()
def run(
    options: WorkloadOptions,
    show: Annotated[
        str, typer.Option(metavar="FIGURE", help=f"Figure of a table: {', '.join(FIGURES)}.")
    ] = "allocated",
    snapshot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the predicted stream for PyTorch's memory visualiser."),
    ] = None,
    no_advice: Annotated[bool, typer.Option("--no-advice", help="Leave out what single changes would save.")] = False,
    json: Json = False,
) -> None:
    """Predict to the byte what a job takes: when, where and why; no GPU and no weights are needed.

    Several batches or lengths give a table.
    Exit codes: 0 when it fits, 1 for an error, 2 for a wrong name or value, 3 when it does not (a table: nothing).
    """
    options.check()
    cells = options.cells()
    if show not in FIGURES:
        raise typer.BadParameter(f"--show {show!r} is not one of {', '.join(FIGURES)}")
    if snapshot is not None and len(cells) > 1:
        raise typer.BadParameter(f"--snapshot holds one stream, and this is a table of {len(cells)}")
    wants_advice = len(cells) == 1 and not no_advice and not json
    estimates, advice = _predict(options.model, cells, wants_advice)
    if json:
        print_json(estimates)
    else:
        _print(estimates, advice, show)
    if snapshot is not None:
        estimates[0].save_snapshot(snapshot)
        console(stderr=True).print(
            f"Wrote the predicted stream to {snapshot}; https://pytorch.org/memory_viz shows it.",
            markup=False,
            soft_wrap=True,
        )
    if all(e.fits is False for e in estimates):
        raise typer.Exit(DOES_NOT_FIT)


def _predict(
    model: str, cells: list[dict[str, Any]], wants_advice: bool
) -> tuple[list["Estimate"], "list[Advice] | None"]:
    """One estimate a cell, and advice for a single one."""
    with working(f"Predicting {model}"):
        from vramfit.estimator.advice import advise
        from vramfit.estimator.predict import estimate

        estimates: list[Estimate] = []
        with within(lambda: f"{len(estimates)} of {len(cells)} done") if len(cells) > 1 else nullcontext():
            estimates.extend(estimate(model, **keywords) for keywords in cells)
        with within(lambda: "what changes would save"):
            return estimates, advise(model, **cells[0]) if wants_advice else None


def _print(estimates: list["Estimate"], advice: "list[Advice] | None", show: str) -> None:
    from vramfit.report.estimate import render_estimate
    from vramfit.report.sizes import render_table

    out = console()
    out.print(render_estimate(estimates[0], advice) if len(estimates) == 1 else render_table(estimates, show))
