"""A report as one HTML file: text, tables and figures, with plotly inside; it asks for nothing from outside."""

import json
from importlib.resources import files
from typing import Any

from vramfit import __version__
from vramfit.errors import MissingExtra
from vramfit.report.html.markup import Drawn, Figure, tag, text
from vramfit.report.html.sections import sections_of
from vramfit.report.html.subject import Subject

MAX_BYTES = 8 * 2**20
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Nothing is fetched, whatever is in the file."""


def render_report(subject: Subject, *, made_at: str = "") -> str:
    """The report of a subject.

    Args:
        made_at: when, to show.

    Raises:
        MissingExtra: plotly is not installed.
    """
    drawn = Drawn()
    body = "".join(sections_of(subject, drawn))
    title = f"{_title(subject)} · vramfit"
    meta = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    )
    made = f"Made by vramfit {__version__}{f', {made_at}' if made_at else ''}, from {subject.source}."
    return "".join(
        (
            '<!doctype html><html lang="en"><head>',
            meta,
            tag("title", text(title)),
            tag("style", _own("report.css")),
            "</head><body><main>",
            body,
            "</main>",
            tag("footer", tag("p", text(made))),
            f'<script type="application/json" id="figures">{_json(drawn.figures)}</script>',
            f"<script>{plotly_script()}</script>" if drawn.figures else "",
            f"<script>{_own('report.js')}</script></body></html>\n",
        )
    )


def _title(subject: Subject) -> str:
    if subject.run is not None:
        return f"Run of {subject.run.model}"
    workload = subject.workload
    kind = "Plan" if subject.plan is not None else "Measurement" if subject.comparison is not None else "Estimate"
    return kind if workload is None else f"{kind} of {workload.model}"


def _own(name: str) -> str:
    return files("vramfit.report.html").joinpath(name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """plotly.js, as its Python package brings it.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        raise MissingExtra("vramfit report", extra="web", package="plotly") from None


def _json(figures: dict[str, Figure]) -> str:
    """JSON that no text inside can end the script with."""
    made: Any = json.dumps(figures, separators=(",", ":"), ensure_ascii=False)
    return str(made).replace("<", "\\u003c")
