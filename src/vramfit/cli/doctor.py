"""`vramfit doctor`: is this machine ready, and if not, what to change."""

from pathlib import Path
from typing import Annotated

import typer

from vramfit.cli.terminal import Json, console, print_json

NAME = "doctor"
EXAMPLE = "vramfit doctor --lock requirements.lock.txt"


def run(
    lock: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the exact versions of this environment: a requirements file, or a conda environment for .yml.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check Python, torch, the driver, the GPU and the settings that change memory.

    Leaves with 0 when nothing stands in the way, 1 when something will fail.
    """
    from vramfit.doctor.checkup import check_environment
    from vramfit.doctor.lock import write_lock
    from vramfit.records.finding import worst
    from vramfit.report.findings import render_findings, summarize

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
