"""`vramfit doctor`: is this machine ready, is this model sound, and if not, what to change."""

from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli.progress import working
from vramfit.cli.terminal import Json, console, print_json
from vramfit.tasks import DEFAULT
from vramfit.workload import CHOICES

EXAMPLE = "vramfit doctor ./my-model --task token-classification --scan"


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder with config.json and weights, a catalogue name or a hub id; without one, the machine "
            "itself is checked.",
        ),
    ] = None,
    task: Annotated[
        str, typer.Option(metavar="NAME", help=f"The head that is wanted. One of {', '.join(CHOICES['task'])}.")
    ] = DEFAULT,
    num_labels: Annotated[
        int | None, typer.Option("--num-labels", metavar="N", help="Size of the head that is wanted.")
    ] = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="Read the weights too: NaN, infinite and all-zero tensors.")
    ] = False,
    lock: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the exact versions of this environment: a requirements file, or a conda environment for .yml.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check the machine (Python, torch, driver, GPU, settings), or a model before it is loaded.

    Exit codes: 0 when nothing stands in the way, 1 when something will fail, 2 for a wrong name or value.
    """
    from vramfit.doctor.environment import write_lock
    from vramfit.records.finding import Finding, worst
    from vramfit.report.findings import render_findings, summarize

    findings: list[Finding]
    with working(f"Checking {model or 'this machine'}"):
        if model is not None:
            from vramfit.doctor.checkup import check_model

            findings = check_model(model, task=task, scan=scan, num_labels=num_labels)
        else:
            from vramfit.doctor.checkup import check_environment

            findings = check_environment()
    if json:
        print_json(findings)
    else:
        out = console()
        out.print(render_findings(findings))
        out.print(f"\n{summarize(findings)}")
    if lock is not None:
        num_packages = write_lock(lock)
        console(stderr=True).print(f"Wrote {num_packages} packages to {lock}", markup=False)
    if worst(findings) == "error":
        raise typer.Exit(1)
