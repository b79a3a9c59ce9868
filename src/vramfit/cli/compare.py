"""`vramfit compare`: models of one task side by side, on the rows of a file."""

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from vramfit.cli.first_look import look_at_file, look_at_gpu, look_at_model
from vramfit.cli.options import Json, Trust, argument, opt, option, parse_names, verb
from vramfit.cli.terminal import say, show, working
from vramfit.records.codec import check_place, replace_file
from vramfit.report.models import render_models
from vramfit.units import format_bytes

Models = Annotated[list[str], argument("Two or more folders that vramfit or transformers saved.", "MODEL…")]
Data = Annotated[str, option("Rows with labels, to measure quality and speed on.", "FILE", "--data")]


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """How models are compared."""

    task: str | None = opt(None, "Task (head) to use. Default: the models' own.", "NAME")
    text_column: str | None = opt(None, "Column of the texts; two for pairs.", "NAME,…")
    label_column: str | None = opt(None, "Column of the labels.", "NAME")
    max_rows: int | None = opt(None, "Read at most N rows.", "N", min=1)
    skip_bad_rows: bool = opt(False, "Leave out rows that cannot be used.")
    batch: int = opt(32, "Effective batch for the memory predictions.", "N", min=1)
    seq: int | None = opt(None, "Truncate sequences to N tokens.", "N", min=1)
    gpu: str | None = opt(None, "Predict memory for this GPU of the catalogue.", "NAME")
    memory: str | None = opt(None, "Memory that PyTorch may reserve while speed is measured.", "SIZE")
    device: str | None = opt(None, "Where speed is measured: cuda, cuda:N, cpu or emulated.", "NAME")
    trust_remote_code: Trust = False

    def keywords(self) -> dict[str, Any]:
        """As `compare` takes them."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "text_column"}
        return given | {"text_columns": parse_names(self.text_column)}


@verb("vramfit compare my-model my-small-model --data dev.csv --html compared.html")
def compare(
    models: Models,
    data: Data,
    options: CompareOptions,
    html: Annotated[Path | None, option("Also write the table, with pictures, as one HTML file.", "FILE")] = None,
    json: Json = False,
) -> None:
    """Compare models on one data set: size, memory in training and serving, latency, throughput, quality.

    Memory is predicted; speed and quality are measured here, a model at a time. The first model is what others are
    compared with.

    Exit codes: 0 done, 1 for an error, 2 for a wrong name or value, 3 when not even one sample fits,
    130 when interrupted.
    """
    look_at_gpu(options.gpu)
    for model in models:
        look_at_model(model)
    look_at_file(data)
    if html is not None:
        from vramfit.report.html.page import plotly_script

        check_place(html, data, *models, what="the page")
        plotly_script()
    with working("Comparing"):
        from vramfit.smaller.comparison import compare

        found = compare(models, data, **options.keywords())
    if html is not None:
        from vramfit.report.html.page import render_report
        from vramfit.report.html.subject import Subject

        subject = Subject(source=data, models=found, environment=found.environment)
        content = render_report(subject, made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")).encode()
        replace_file(html, content)
        say(f"Wrote {html}, {format_bytes(len(content))}.")
    show(found, render_models, json=json)
