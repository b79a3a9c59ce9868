"""The course of a step as a figure: predicted, stacked by category, with what was measured over it."""

from collections.abc import Sequence
from itertools import groupby

from vramfit.records.course import StepCourse
from vramfit.records.estimate import CATEGORIES, Estimate, TimelinePoint
from vramfit.report.html.marks import Figure, gib, limit_line


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
