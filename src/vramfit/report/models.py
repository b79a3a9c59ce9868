"""Models side by side, for the terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from vramfit.records.model_table import ModelRow, ModelTable
from vramfit.report.charts import table
from vramfit.report.words import duration
from vramfit.units import counted, format_bytes

COLUMNS = ("model", "layers", "parameters", "on disk", "training", "serving", "latency", "rows/s")
"""The metric comes last, by its name."""


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
            "–" if row.disk_bytes is None else format_bytes(row.disk_bytes),
            format_bytes(row.training_bytes),
            format_bytes(row.serving_bytes),
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
    yield from (f"{note[:1].upper()}{note[1:]}." for note in found.notes)
