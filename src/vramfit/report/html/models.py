"""Models side by side as a section of a report: a table, and quality against size, speed and memory."""

from collections.abc import Callable, Iterator

from vramfit.records.model_table import ModelRow, ModelTable
from vramfit.report.html.figures import CURVE_COLOURS
from vramfit.report.html.markup import Drawn, Figure, section, table, tag, text
from vramfit.report.models import COLUMNS, about, cells_of, short_names
from vramfit.units import counted

MIB = 2**20
AXES: tuple[tuple[str, str, Callable[[ModelRow], float]], ...] = (
    ("latency", "milliseconds for one row", lambda row: 1e3 * row.latency_s),
    ("parameters", "million parameters", lambda row: row.num_parameters / 1e6),
    ("training", "MiB reserved in training", lambda row: row.training_bytes / MIB),
    ("serving", "MiB reserved in serving", lambda row: row.serving_bytes / MIB),
)
"""Name, axis and figure of each picture; the score is the other axis."""


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
    yield section("Side by side", table(head, rows, right=range(1, len(head))), about=" ".join(about(found)))
    made = []
    for name, title, value in AXES:
        said = f"{found.metric} against {title}"
        place = drawn.place(f"models-{name}", _points(found, names, title, value), said)
        made.append(tag("div", tag("h3", text(said)), place))
    better = "Better is up and left." if found.higher_is_better else "Better is down and left."
    yield section("What a smaller model costs", tag("div", *made, class_="grid"), about=better)


def _points(found: ModelTable, names: list[str], title: str, value: Callable[[ModelRow], float]) -> Figure:
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [round(value(row), 4)],
            "y": [row.quality],
            "marker": {"size": 13, "color": CURVE_COLOURS[place % len(CURVE_COLOURS)]},
            "hovertemplate": f"%{{y:.4f}} {found.metric}, %{{x:,.3g}} {title}<extra></extra>",
        }
        for place, (name, row) in enumerate(zip(names, found.rows, strict=True))
    ]
    axes = {"xaxis": {"title": {"text": title}, "rangemode": "tozero"}, "yaxis": {"title": {"text": found.metric}}}
    return {"data": data, "layout": {"height": 320, "legend": {"orientation": "h", "y": -0.3}, **axes}}
