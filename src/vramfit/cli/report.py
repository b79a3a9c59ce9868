"""`vramfit report`: a run, a plan, an estimate or a measurement as one HTML file."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramfit.cli.progress import working
from vramfit.cli.terminal import Json, console, print_json
from vramfit.errors import VramfitError
from vramfit.stages import tell
from vramfit.units import format_bytes

if TYPE_CHECKING:
    from vramfit.report.html.subject import Subject

EXAMPLE = "vramfit report my-model --output report.html"
FILE_NAME = "report.html"


def run(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The folder of a run, or JSON of an estimate, a plan, a measurement (measure --json)."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write. Default: report.html in the folder, or beside the file."),
    ] = None,
    no_grid: Annotated[
        bool, typer.Option("--no-grid", help="Leave out the map of batches and lengths: nothing is predicted anew.")
    ] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    json: Json = False,
) -> None:
    """Write everything there is to see as one HTML file that needs no network: mail it, keep it.

    The course of a step by category, predicted over measured where a step was recorded; what is alive at the peak by
    module; what fits by batch and length; a plan's alternatives; loss, scores and throughput of a run.
    """
    from datetime import UTC, datetime

    from vramfit.records.codec import replace_file
    from vramfit.report.html.page import plotly_script, render_report
    from vramfit.report.html.subject import read_subject

    subject = read_subject(source)
    plotly_script()
    path = output or (source / FILE_NAME if source.is_dir() else source.with_suffix(".html"))
    if not no_grid:
        subject = _predicted(subject)
    made_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    content = render_report(subject, made_at=made_at).encode()
    replace_file(path, content)
    if json:
        print_json({"report": str(path), "num_bytes": len(content), "notes": subject.notes})
    else:
        console().print(f"Wrote {path}, {format_bytes(len(content))}.", markup=False, soft_wrap=True)
    if open_browser:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def _predicted(subject: "Subject") -> "Subject":
    """The subject with what has to be predicted for it; where that cannot be done, it says why."""
    workload = subject.workload
    if workload is None:
        return subject
    with working("Predicting"):
        from vramfit.estimator.predict import estimate
        from vramfit.estimator.search import fit_grid
        from vramfit.report.html.subject import NOT_PREDICTED

        def show(done: int, total: int) -> None:
            tell(f"batches and lengths, {done} of {total} done")

        try:
            if subject.estimate is None:
                subject = replace(subject, estimate=estimate(workload.model, **_keywords(workload)))
            course = subject.course
            if course is not None and subject.course_estimate is None:
                keywords = {**_keywords(workload), **course.size}
                subject = replace(subject, course_estimate=estimate(workload.model, **keywords))
            return replace(subject, grid=fit_grid(workload, on_cell=show))
        except VramfitError as error:
            return replace(subject, notes=(*subject.notes, f"{NOT_PREDICTED}: {error}"))


def _keywords(workload: object) -> dict[str, object]:
    from dataclasses import fields

    return {f.name: getattr(workload, f.name) for f in fields(workload) if f.name != "model"}  # type: ignore[arg-type]
