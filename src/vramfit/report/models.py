"""Models side by side: a table, and in a report also quality against size, speed and memory."""

from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from vramfit.records.measurement import ModelRow, ModelTable
from vramfit.report.charts import table
from vramfit.report.html import Drawn, Figure, section, tag, text
from vramfit.report.html import table as html_table
from vramfit.report.html.figures import CURVE_COLOURS, axis, figure, legend, scatter
from vramfit.report.words import duration, sentence
from vramfit.units import MIB, counted, format_bytes

COLUMNS = ("model", "layers", "parameters", "on disk", "training", "serving", "latency", "rows/s")
"""The metric comes last, by its name."""
AXES: tuple[tuple[str, str, Callable[[ModelRow], float | None]], ...] = (
    ("latency", "milliseconds for one row", lambda row: 1e3 * row.latency_s),
    ("parameters", "million parameters", lambda row: row.num_parameters / 1e6),
    ("training", "MiB reserved in training", lambda row: row.training_bytes and row.training_bytes / MIB),
    ("serving", "MiB reserved in serving", lambda row: row.serving_bytes and row.serving_bytes / MIB),
)
"""Name, axis and figure of each picture; the score is the other axis."""


def render_models(found: ModelTable) -> RenderableType:
    """One row a model, and where the figures come from."""
    names = short_names(found)
    head = (*COLUMNS, found.metric)
    made = table(*head, right=head[1:])
    for name, cells in zip(names, cells_of(found), strict=True):
        made.add_row(name, *cells)
    notes = [Text(line, style="dim") for line in about(found)]
    return Group(made, Text(""), *notes)


def cells_of(found: ModelTable) -> Iterator[tuple[str, ...]]:
    """The figures of each model as text, in the order of `COLUMNS`; those after the first model beside it."""
    first = found.rows[0]
    for row in found.rows:
        is_first = row is first
        yield (
            f"{row.num_layers}",
            _count(row.num_parameters),
            *("–" if n is None else format_bytes(n) for n in (row.disk_bytes, row.training_bytes, row.serving_bytes)),
            duration(row.latency_s),
            f"{row.samples_per_s:,.0f}" + ("" if is_first else f" ({row.samples_per_s / first.samples_per_s:.2f}×)"),
            quality_words(row, None if is_first else first),
        )


def _count(number: int) -> str:
    """A number of parameters as people say it.

    >>> _count(22_713_216), _count(33_826)
    ('22.7 M', '34 K')
    """
    return f"{number / 1e6:,.1f} M" if number >= 10**6 else f"{number / 1e3:,.0f} K"


def quality_words(row: ModelRow, first: ModelRow | None) -> str:
    """A score, and the share that it is of the first model's."""
    share = f" ({100 * row.quality / first.quality:.1f} %)" if first is not None and first.quality > 0 else ""
    return f"{row.quality:.4f}{share}"


def short_names(found: ModelTable) -> list[str]:
    """The last part of each model's path, where that tells them apart."""
    last = [row.model.rstrip("/").rpartition("/")[2] for row in found.rows]
    return last if len(set(last)) == len(last) else [row.model for row in found.rows]


def about(found: ModelTable) -> Iterator[str]:
    """What was measured and what was predicted."""
    where = f" on {found.gpu}" if found.gpu is not None else ""
    rows = counted(found.num_samples, "row")
    yield f"Measured on {found.device}: {found.metric}, latency (one row, median) and rows/s, {rows} of {found.data}."
    yield f"Predicted{where}: what training and serving reserve at most, batch {found.batch}, {found.seq} tokens, fp32."
    yield from map(sentence, found.notes)


def models_head(found: ModelTable) -> str:
    """The first card of the report."""
    asked = f"{found.task} · {found.data} · measured on {found.device}"
    headline = f"{counted(len(found.rows), 'model')} compared"
    return tag("section", tag("p", text(asked), class_="quiet"), tag("h1", text(headline)), class_="card head")


def models_sections(found: ModelTable, drawn: Drawn) -> Iterator[str]:
    """The table, then a picture for each figure that a model may be smaller in."""
    names = short_names(found)
    head = (*COLUMNS, found.metric)
    rows = [(name, *cells) for name, cells in zip(names, cells_of(found), strict=True)]
    yield section("Side by side", html_table(head, rows, right=range(1, len(head))), about=" ".join(about(found)))
    made = []
    for name, title, value in AXES:
        said = f"{found.metric} against {title}"
        place = drawn.place(f"models-{name}", _points(found, names, title, value), said)
        made.append(tag("div", tag("h3", text(said)), place))
    better = "Better is up and left." if found.higher_is_better else "Better is down and left."
    yield section("What a smaller model costs", tag("div", *made, class_="grid"), about=better)


def _points(found: ModelTable, names: list[str], title: str, value: Callable[[ModelRow], float | None]) -> Figure:
    data = []
    for place, (name, row) in enumerate(zip(names, found.rows, strict=True)):
        look = {"size": 13, "color": CURVE_COLOURS[place % len(CURVE_COLOURS)]}
        hover = f"%{{y:.4f}} {found.metric}, %{{x:,.3g}} {title}<extra></extra>"
        x = [round(at, 4)] if (at := value(row)) is not None else []
        data.append(scatter(name, x, [row.quality][: len(x)], mode="markers", marker=look, hovertemplate=hover))
    return figure(data, 320, xaxis=axis(title, rangemode="tozero"), yaxis=axis(found.metric), legend=legend(-0.3))
