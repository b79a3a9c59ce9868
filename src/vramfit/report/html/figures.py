"""Figures for plotly, as plain data; a colour is `@name` and gets its value from the page's light or dark style."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from vramfit.records.estimate import CATEGORIES, Estimate, FitGrid, TimelinePoint
from vramfit.records.plan import Plan
from vramfit.records.run import StepCourse
from vramfit.report.html.markup import Figure, gib, limit_line
from vramfit.report.html.modules import peak_tree
from vramfit.units import GIB, format_bytes

SCORE = "score"
MAX_SINGLE_TICKS = 10
MIN_TEXT = 11
"""Pixels: a name that would have to be smaller is left out."""


def icicle(estimate: Estimate) -> Figure:
    """What is alive at the peak, by module."""
    nodes = peak_tree(estimate)
    return {
        "data": [
            {
                "type": "icicle",
                "ids": [n.path for n in nodes],
                "labels": [n.label for n in nodes],
                "parents": [n.parent for n in nodes],
                "values": [n.num_bytes for n in nodes],
                "text": [format_bytes(n.num_bytes, digits=1 if n.num_bytes >= GIB else 0) for n in nodes],
                "branchvalues": "total",
                "maxdepth": 6,
                "tiling": {"orientation": "v", "pad": 1},
                "textinfo": "label+text",
                "textfont": {"color": "#ffffff"},
                "hovertemplate": "%{id}<br>%{text} · %{percentRoot:.1%} of the peak<extra></extra>",
                "marker": {"colors": [f"@{n.colour}" for n in nodes], "line": {"width": 1, "color": "@card"}},
                "sort": False,
            }
        ],
        "layout": {
            "height": 480,
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "uniformtext": {"minsize": MIN_TEXT, "mode": "hide"},
        },
    }


def heat_map(grid: FitGrid, micro_batch: int, seq: int) -> Figure:
    """Batches by lengths; the border runs between what fits and what does not."""
    most = max(max(row) for row in grid.safe_reserved_bytes)
    whole = grid.capacity_bytes or most
    shares = [[min(n / whole, 2.0) for n in row] for row in grid.safe_reserved_bytes]
    text = [[format_bytes(n, digits=1 if n >= GIB else 0) for n in row] for row in grid.safe_reserved_bytes]
    scale = [[0, "@fit-low"], [0.499, "@fit-high"], [0.501, "@over-low"], [1, "@over-high"]]
    cells = {
        "type": "heatmap",
        "z": shares,
        "text": text,
        "texttemplate": "%{text}",
        "zmin": 0,
        "zmax": 2,
        "colorscale": scale if grid.capacity_bytes is not None else [[0, "@fit-low"], [1, "@fit-high"]],
        "showscale": False,
        "hovertemplate": "%{text} reserved at most<extra></extra>",
        "xgap": 1,
        "ygap": 1,
    }
    return {
        "data": [cells],
        "layout": {
            "height": 80 + 38 * len(grid.micro_batches),
            "xaxis": _numbers(grid.seqs, "tokens a sequence"),
            "yaxis": _numbers(grid.micro_batches, "samples a forward pass"),
            "shapes": [*border(grid), *_cell(grid, micro_batch, seq)],
            "showlegend": False,
        },
    }


def _numbers(values: Sequence[int], title: str) -> Figure:
    labels = [f"{n:,}" for n in values]
    places = list(range(len(values)))
    return {
        "tickvals": places,
        "ticktext": labels,
        "title": {"text": title},
        "zeroline": False,
        "showgrid": False,
        "range": [-0.5, len(values) - 0.5],
    }


def _cell(grid: FitGrid, micro_batch: int, seq: int) -> list[Figure]:
    """The frame of one cell."""
    if seq not in grid.seqs or micro_batch not in grid.micro_batches:
        return []
    x, y = grid.seqs.index(seq), grid.micro_batches.index(micro_batch)
    look = {"color": "@ink", "width": 2, "dash": "dot"}
    return [{"type": "rect", "x0": x - 0.46, "x1": x + 0.46, "y0": y - 0.4, "y1": y + 0.4, "line": look}]


def border(grid: FitGrid) -> list[Figure]:
    """The edges between cells of which one fits and the other does not."""
    lines = []
    for y, row in enumerate(grid.fits):
        for x, fits in enumerate(row):
            if fits is None:
                continue
            if x + 1 < len(row) and row[x + 1] != fits:
                lines.append((x + 0.5, y - 0.5, x + 0.5, y + 0.5))
            if y + 1 < len(grid.fits) and grid.fits[y + 1][x] != fits:
                lines.append((x - 0.5, y + 0.5, x + 0.5, y + 0.5))
    look = {"color": "@ink", "width": 3}
    return [{"type": "line", "x0": a, "y0": b, "x1": c, "y1": d, "line": look} for a, b, c, d in lines]


def alternatives(plan: Plan) -> Figure:
    """What was predicted, as memory against time."""
    groups: Mapping[str, tuple[list[Any], str, str]] = {
        "fits": ([a for a in plan.alternatives if a.fits and a.allowed], "circle-open", "@accent"),
        "fits, but is not allowed": (
            [a for a in plan.alternatives if a.fits and not a.allowed],
            "diamond-open",
            "@tight",
        ),
        "does not fit": ([a for a in plan.alternatives if not a.fits], "x", "@bad"),
    }
    e = plan.estimate
    own_s = e.step_time_s or plan.step_time_s
    is_short = max(own_s, *(a.step_time_s for a in plan.alternatives)) < 1
    unit, scale = ("milliseconds", 1000) if is_short else ("seconds", 1)
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [scale * a.step_time_s for a in found],
            "y": [gib(a.safe_reserved_bytes) for a in found],
            "text": [f"{a.settings}<br>passes of {a.split}" for a in found],
            "hovertemplate": f"%{{text}}<br>%{{x:.3g}} {unit} a step, %{{y:.2f}} GiB<extra></extra>",
            "marker": {"size": 11, "symbol": symbol, "color": colour, "line": {"width": 2}},
        }
        for name, (found, symbol, colour) in groups.items()
        if found
    ]
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "this plan",
            "x": [scale * own_s],
            "y": [gib(e.safe_reserved_bytes)],
            "marker": {"size": 16, "symbol": "star", "color": "@good"},
            "hovertemplate": f"this plan<br>%{{x:.3g}} {unit} a step, %{{y:.2f}} GiB<extra></extra>",
        }
    )
    return {
        "data": data,
        "layout": {
            "height": 360,
            "xaxis": {"title": {"text": f"{unit} a step"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "reserved at most, GiB"}, "rangemode": "tozero"},
            "shapes": [limit_line(plan.budget_bytes)],
            "legend": {"orientation": "h", "y": -0.22},
        },
    }


def curve(lines: Mapping[str, tuple[list[int], list[float]]], title: str, *, limit: float | None = None) -> Figure:
    """Figures of a run by step: name → steps and values; few of them have marks too.

    Scores between 0 and 1 are drawn in just that room.
    """
    colours = ("@weights", "@optimizer", "@activations", "@gradients", "@inputs", "@temporaries")
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(steps) <= 40 else "lines",
            "name": name,
            "x": steps,
            "y": values,
            "line": {"color": colours[i % len(colours)], "width": 2},
        }
        for i, (name, (steps, values)) in enumerate(lines.items())
    ]
    shapes = (
        []
        if limit is None
        else [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": limit,
                "y1": limit,
                "line": {"color": "@ink", "width": 2, "dash": "dash"},
            }
        ]
    )
    return {
        "data": data,
        "layout": {
            "height": 280,
            "xaxis": {"title": {"text": "step"}, "rangemode": "tozero", **_whole_steps(lines)},
            "yaxis": {
                "title": {"text": title},
                "rangemode": "tozero",
                **({"range": [0, 1.05]} if _are_shares(lines, title) else {}),
            },
            "showlegend": len(data) > 1,
            "legend": {"orientation": "h", "y": -0.45},
            "shapes": shapes,
        },
    }


def _whole_steps(lines: Mapping[str, tuple[list[int], list[float]]]) -> Figure:
    """Ticks at whole steps, where there are so few that plotly would cut them."""
    last = max((step for steps, _ in lines.values() for step in steps), default=0)
    return {"dtick": 1} if last <= MAX_SINGLE_TICKS else {}


def _are_shares(lines: Mapping[str, tuple[list[int], list[float]]], title: str) -> bool:
    return title == SCORE and all(0 <= value <= 1 for _, values in lines.values() for value in values)


def timeline(estimate: Estimate, course: StepCourse | None = None) -> Figure:
    """A step stacked by category; what was measured lies over it."""
    points = estimate.timeline
    scale = _spread(len(points))
    data: list[Figure] = [
        {
            "type": "scatter",
            "name": category,
            "x": scale,
            "y": [gib(p.breakdown.get(category, 0)) for p in points],
            "stackgroup": "live",
            "line": {"width": 0.5, "color": f"@{category}", "shape": "hvh"},
            "fillcolor": f"@{category}",
            "hovertemplate": "%{y:.3f} GiB",
        }
        for category in CATEGORIES
        if any(p.breakdown.get(category) for p in points)
    ]
    data.append(_line("predicted, requested", scale, [p.requested_bytes for p in points], "@ink", dash="dot"))
    if course is not None:
        measured = course.requested_bytes
        data.append(_line("measured, requested", _spread(len(measured)), measured, "@bad", width=2.5))
    marks, names = _parts(points)
    lines = [limit_line(estimate.capacity_bytes)] if is_near(estimate) else []
    return {
        "data": data,
        "layout": {
            "height": 430,
            "hovermode": "x unified",
            "yaxis": {"title": {"text": "allocated, GiB"}, "rangemode": "tozero"},
            "xaxis": {"showticklabels": False, "showgrid": False, "range": [0, 1]},
            "shapes": [*marks, *lines],
            "annotations": names,
            "legend": {"orientation": "h", "y": -0.06},
        },
    }


def is_near(estimate: Estimate) -> bool:
    """Whether the limit can be shown without flattening the rest."""
    return estimate.capacity_bytes is not None and estimate.capacity_bytes < 1.6 * estimate.peak_allocated_bytes


def _spread(num: int) -> list[float]:
    return [(i + 0.5) / num for i in range(num)]


def _line(
    name: str, x: list[float], sizes: Sequence[int], colour: str, *, dash: str = "solid", width: float = 1.5
) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": [gib(n) for n in sizes],
        "line": {"color": colour, "dash": dash, "width": width},
        "hovertemplate": "%{y:.3f} GiB",
    }


def _parts(points: Sequence[TimelinePoint]) -> tuple[list[Figure], list[Figure]]:
    """Lines between forward, backward and optimizer, and their names above."""
    marks, names, at = [], [], 0
    for part, run in groupby(p.part for p in points):
        width = sum(1 for _ in run)
        begin, end = at / len(points), (at + width) / len(points)
        if at:
            thin = {"color": "@line", "width": 1}
            marks.append({"type": "line", "yref": "paper", "x0": begin, "x1": begin, "y0": 0, "y1": 1, "line": thin})
        if width >= 0.05 * len(points):
            names.append(
                {
                    "x": (begin + end) / 2,
                    "y": 1.0,
                    "yref": "paper",
                    "yanchor": "bottom",
                    "text": part,
                    "showarrow": False,
                    "font": {"size": 12},
                }
            )
        at += width
    return marks, names
