"""`vramfit report`: a run, a plan, an estimate or a measurement as one HTML file."""

import webbrowser
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from vramfit.cli.options import Json, argument, option, verb
from vramfit.cli.terminal import print_json, say, working
from vramfit.errors import VramfitError
from vramfit.records.codec import replace_file
from vramfit.report.html.page import plotly_script, render_report
from vramfit.report.html.subject import NOT_PREDICTED, Subject, read_subject
from vramfit.stages import tell
from vramfit.units import format_bytes
from vramfit.workload import Workload

FILE_NAME = "report.html"


@verb("vramfit report my-model --output report.html")
def report(
    source: Annotated[
        Path, argument("The folder of a run, or JSON of an estimate, a plan, a measurement, a comparison.", "RUN")
    ],
    output: Annotated[
        Path | None, option("Where to write. Default: report.html in the folder, or beside the file.", "FILE")
    ] = None,
    no_grid: Annotated[
        bool, option("Leave out the map of batches and lengths: nothing is predicted anew.", None, "--no-grid")
    ] = False,
    open_browser: Annotated[bool, option("Open it in the browser.", None, "--open")] = False,
    json: Json = False,
) -> None:
    """Write a run, a plan, an estimate or a measurement as one HTML file that needs no network.

    It shows the memory of a step by category, predicted over measured where a step was recorded; what is alive at the
    peak by module; what fits by batch and length; a plan's alternatives; loss, scores and throughput of a run.
    """
    subject = read_subject(source)
    plotly_script()
    path = output or (source / FILE_NAME if source.is_dir() else source.with_suffix(".html"))
    if not no_grid:
        subject = _predicted(subject)
    content = render_report(subject, made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")).encode()
    replace_file(path, content)
    if json:
        print_json({"report": str(path), "num_bytes": len(content), "notes": subject.notes})
    else:
        say(f"Wrote {path}, {format_bytes(len(content))}.", stderr=False)
    if open_browser:
        webbrowser.open(path.resolve().as_uri())


def _predicted(subject: Subject) -> Subject:
    """The subject with what has to be predicted for it; where that cannot be done, it says why."""
    workload = subject.workload
    if workload is None:
        return subject
    with working("Predicting"):
        from vramfit.estimator.predict import estimate
        from vramfit.estimator.search import fit_grid

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


def _keywords(workload: Workload) -> dict[str, object]:
    return {f.name: getattr(workload, f.name) for f in fields(workload) if f.name != "model"}
