"""Figures for plotly, as plain data; a colour is `@name` and gets its value from the page's light or dark style."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from vramfit.records.estimate import CATEGORIES, Estimate, FitGrid, TimelinePoint
from vramfit.records.plan import Plan
from vramfit.records.run import StepCourse
from vramfit.report.html import Figure
from vramfit.report.words import group_name
from vramfit.units import GIB, format_bytes

SCORE = "score"
MAX_SINGLE_TICKS = 10
MIN_TEXT = 11
"""Pixels: a name that would have to be smaller is left out."""
CURVE_COLOURS = ("@weights", "@optimizer", "@activations", "@gradients", "@inputs", "@temporaries")
Lines = Mapping[str, tuple[list[int], list[float]]]
"""Name → steps and values."""
OUTSIDE = "(outside of modules)"
MAX_CHILDREN = 60
"""Of one node; the smallest beyond it are put together."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_COLOURS = (
    ("embeddings", "temporaries"),
    ("encoder", "activations"),
    ("layers", "activations"),
    ("transformer", "activations"),
    ("classifier", "inputs"),
    ("head", "inputs"),
    ("cls", "inputs"),
    ("pooler", "gradients"),
)


def figure(data: list[Figure], height: int, **layout: Any) -> Figure:
    """Traces in a layout."""
    return {"data": data, "layout": {"height": height, **layout}}


def scatter(name: str, x: Sequence[float], y: Sequence[float], **look: Any) -> Figure:
    """Points or a line."""
    return {"type": "scatter", "name": name, "x": x, "y": y, **look}


def axis(title: str, **more: Any) -> Figure:
    """An axis with its title."""
    return {"title": {"text": title}, **more}


def legend(y: float) -> Figure:
    """Names in a row below the axes."""
    return {"orientation": "h", "y": y}


def _shape(kind: str, corners: Sequence[float], line: Figure, **more: Any) -> Figure:
    """A line or a frame between two corners."""
    return {"type": kind, **dict(zip(("x0", "y0", "x1", "y1"), corners, strict=True)), "line": line, **more}


def _limit(y: float) -> Figure:
    """A dashed line across the figure."""
    return _shape("line", (0, y, 1, y), {"color": "@ink", "width": 2, "dash": "dash"}, xref="paper")


def gib(num_bytes: int) -> float:
    """A size in GiB, fine enough to draw."""
    return round(num_bytes / GIB, 5)


def _short(num_bytes: int) -> str:
    return format_bytes(num_bytes, digits=1 if num_bytes >= GIB else 0)


def icicle(estimate: Estimate) -> Figure:
    """What is alive at the peak, by module."""
    nodes = peak_tree(estimate)
    trace = {
        "type": "icicle",
        "ids": [n.path for n in nodes],
        "labels": [n.label for n in nodes],
        "parents": [n.parent for n in nodes],
        "values": [n.num_bytes for n in nodes],
        "text": [_short(n.num_bytes) for n in nodes],
        "branchvalues": "total",
        "maxdepth": 6,
        "tiling": {"orientation": "v", "pad": 1},
        "textinfo": "label+text",
        "textfont": {"color": "#ffffff"},
        "hovertemplate": "%{id}<br>%{text} · %{percentRoot:.1%} of the peak<extra></extra>",
        "marker": {"colors": [f"@{n.colour}" for n in nodes], "line": {"width": 1, "color": "@card"}},
        "sort": False,
    }
    margin = {"l": 8, "r": 8, "t": 8, "b": 8}
    return figure([trace], 480, margin=margin, uniformtext={"minsize": MIN_TEXT, "mode": "hide"})


def heat_map(grid: FitGrid, micro_batch: int, seq: int) -> Figure:
    """Batches by lengths; the border runs between what fits and what does not."""
    whole = grid.capacity_bytes or max(max(row) for row in grid.safe_reserved_bytes)
    scale = [[0, "@fit-low"], [0.499, "@fit-high"], [0.501, "@over-low"], [1, "@over-high"]]
    cells = {
        "type": "heatmap",
        "z": [[min(n / whole, 2.0) for n in row] for row in grid.safe_reserved_bytes],
        "text": [[_short(n) for n in row] for row in grid.safe_reserved_bytes],
        "texttemplate": "%{text}",
        "zmin": 0,
        "zmax": 2,
        "colorscale": scale if grid.capacity_bytes is not None else [[0, "@fit-low"], [1, "@fit-high"]],
        "showscale": False,
        "hovertemplate": "%{text} reserved at most<extra></extra>",
        "xgap": 1,
        "ygap": 1,
    }
    return figure(
        [cells],
        80 + 38 * len(grid.micro_batches),
        xaxis=_numbers(grid.seqs, "tokens a sequence"),
        yaxis=_numbers(grid.micro_batches, "samples a forward pass"),
        shapes=[*border(grid), *_cell(grid, micro_batch, seq)],
        showlegend=False,
    )


def _numbers(values: Sequence[int], title: str) -> Figure:
    places, labels = list(range(len(values))), [f"{n:,}" for n in values]
    ends = [-0.5, len(values) - 0.5]
    return axis(title, tickvals=places, ticktext=labels, zeroline=False, showgrid=False, range=ends)


def _cell(grid: FitGrid, micro_batch: int, seq: int) -> list[Figure]:
    """The frame of one cell."""
    if seq not in grid.seqs or micro_batch not in grid.micro_batches:
        return []
    x, y = grid.seqs.index(seq), grid.micro_batches.index(micro_batch)
    look = {"color": "@ink", "width": 2, "dash": "dot"}
    return [_shape("rect", (x - 0.46, y - 0.4, x + 0.46, y + 0.4), look)]


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
    return [_shape("line", corners, {"color": "@ink", "width": 3}) for corners in lines]


def alternatives(plan: Plan) -> Figure:
    """What was predicted, as memory against time."""
    e, others = plan.estimate, plan.alternatives
    own_s = e.step_time_s or plan.step_time_s
    unit, scale = ("milliseconds", 1000) if max(own_s, *(a.step_time_s for a in others)) < 1 else ("seconds", 1)
    said = f"%{{x:.3g}} {unit} a step, %{{y:.2f}} GiB<extra></extra>"
    data = []
    for name, found, symbol, colour in (
        ("fits", [a for a in others if a.fits and a.allowed], "circle-open", "@accent"),
        ("fits, but is not allowed", [a for a in others if a.fits and not a.allowed], "diamond-open", "@tight"),
        ("does not fit", [a for a in others if not a.fits], "x", "@bad"),
    ):
        x, y = [scale * a.step_time_s for a in found], [gib(a.safe_reserved_bytes) for a in found]
        text = [f"{a.settings}<br>passes of {a.split}" for a in found]
        marker = {"size": 11, "symbol": symbol, "color": colour, "line": {"width": 2}}
        more = {"mode": "markers", "text": text, "hovertemplate": f"%{{text}}<br>{said}", "marker": marker}
        data += [scatter(name, x, y, **more)] if found else []
    marker = {"size": 16, "symbol": "star", "color": "@good"}
    more = {"mode": "markers", "marker": marker, "hovertemplate": f"this plan<br>{said}"}
    data.append(scatter("this plan", [scale * own_s], [gib(e.safe_reserved_bytes)], **more))
    return figure(
        data,
        360,
        xaxis=axis(f"{unit} a step", rangemode="tozero"),
        yaxis=axis("reserved at most, GiB", rangemode="tozero"),
        shapes=[_limit(gib(plan.budget_bytes))],
        legend=legend(-0.22),
    )


def curve(lines: Lines, title: str, *, limit: float | None = None) -> Figure:
    """Figures of a run by step; few of them have marks too, and scores between 0 and 1 are drawn in just that room."""
    data = []
    for i, (name, (steps, values)) in enumerate(lines.items()):
        line = {"color": CURVE_COLOURS[i % len(CURVE_COLOURS)], "width": 2}
        mode = "lines+markers" if len(steps) <= 40 else "lines"
        data.append(scatter(name, steps, values, mode=mode, line=line))
    last = max((step for steps, _ in lines.values() for step in steps), default=0)
    whole = {"dtick": 1} if last <= MAX_SINGLE_TICKS else {}  # plotly would put ticks between so few steps
    are_shares = title == SCORE and all(0 <= value <= 1 for _, values in lines.values() for value in values)
    return figure(
        data,
        280,
        xaxis=axis("step", rangemode="tozero", **whole),
        yaxis=axis(title, rangemode="tozero", **({"range": [0, 1.05]} if are_shares else {})),
        showlegend=len(data) > 1,
        legend=legend(-0.45),
        shapes=[] if limit is None else [_limit(limit)],
    )


def timeline(estimate: Estimate, course: StepCourse | None = None) -> Figure:
    """A step stacked by category; what was measured lies over it."""
    points = estimate.timeline
    scale, hover = _spread(len(points)), "%{y:.3f} GiB"
    data = []
    for category in CATEGORIES:
        if any(p.breakdown.get(category) for p in points):
            line = {"width": 0.5, "color": f"@{category}", "shape": "hvh"}
            look = {"stackgroup": "live", "line": line, "fillcolor": f"@{category}", "hovertemplate": hover}
            data.append(scatter(category, scale, [gib(p.breakdown.get(category, 0)) for p in points], **look))
    asked = [gib(p.requested_bytes) for p in points]
    line = {"color": "@ink", "dash": "dot", "width": 1.5}
    data.append(scatter("predicted, requested", scale, asked, mode="lines", line=line, hovertemplate=hover))
    if course is not None:
        measured, line = [gib(n) for n in course.requested_bytes], {"color": "@bad", "dash": "solid", "width": 2.5}
        x = _spread(len(measured))
        data.append(scatter("measured, requested", x, measured, mode="lines", line=line, hovertemplate=hover))
    marks, names = _parts(points)
    return figure(
        data,
        430,
        hovermode="x unified",
        yaxis=axis("allocated, GiB", rangemode="tozero"),
        xaxis={"showticklabels": False, "showgrid": False, "range": [0, 1]},
        shapes=[*marks, *([_limit(gib(estimate.capacity_bytes or 0))] if is_near(estimate) else [])],
        annotations=names,
        legend=legend(-0.06),
    )


def is_near(estimate: Estimate) -> bool:
    """Whether the limit can be shown without flattening the rest."""
    return estimate.capacity_bytes is not None and estimate.capacity_bytes < 1.6 * estimate.peak_allocated_bytes


def _spread(num: int) -> list[float]:
    return [(i + 0.5) / num for i in range(num)]


def _parts(points: Sequence[TimelinePoint]) -> tuple[list[Figure], list[Figure]]:
    """Lines between forward, backward and optimizer, and their names above."""
    marks, names, at = [], [], 0
    above = {"y": 1.0, "yref": "paper", "yanchor": "bottom", "showarrow": False, "font": {"size": 12}}
    for part, run in groupby(p.part for p in points):
        width = sum(1 for _ in run)
        begin, end = at / len(points), (at + width) / len(points)
        if at:
            marks.append(_shape("line", (begin, 0, begin, 1), {"color": "@line", "width": 1}, yref="paper"))
        if width >= 0.05 * len(points):
            names.append({"x": (begin + end) / 2, "text": part, **above})
        at += width
    return marks, names


@dataclass(frozen=True, slots=True)
class Node:
    """One module with all that is inside it."""

    path: str
    label: str
    parent: str
    num_bytes: int
    colour: str
    """The name of its colour."""


def peak_tree(estimate: Estimate) -> list[Node]:
    """What is alive at the peak; layers that have numbers as one, what belongs to no module by what it is."""
    inside = join_layers({path: num_bytes for path, num_bytes in estimate.modules.items() if path})
    rest = sum(estimate.modules.values()) - sum(inside.values())
    for group in estimate.groups:
        if not group.module and rest >= group.allocated_bytes:
            path = f"{OUTSIDE}.{group_name(group).replace('.', ' ')}"
            inside[path] = inside.get(path, 0) + group.allocated_bytes
            rest -= group.allocated_bytes
    root = estimate.workload.model.rstrip("/").rpartition("/")[2]
    return module_tree({**inside, **({"": rest} if rest else {})}, root=root)


def join_layers(modules: Mapping[str, int]) -> dict[str, int]:
    """Modules whose paths differ by a number alone, as one.

    >>> join_layers({"bert.layer.0.dense": 2, "bert.layer.1.dense": 3, "bert.layer.1": 1, "bert.pooler": 4})
    {'bert.layer × 2.dense': 5, 'bert.layer × 2': 1, 'bert.pooler': 4}
    """
    numbers: dict[str, set[str]] = {}
    for path in modules:
        for found in _NUMBER.finditer(path):
            numbers.setdefault(_NUMBER.sub(".*", path[: found.start()]), set()).add(found[0])
    joined: dict[str, int] = {}
    for path, num_bytes in modules.items():

        def name(found: re.Match[str], path: str = path) -> str:
            num = len(numbers[_NUMBER.sub(".*", path[: found.start()])])
            return f" × {num}" if num > 1 else found[0]

        key = _NUMBER.sub(name, path)
        joined[key] = joined.get(key, 0) + num_bytes
    return joined


def module_tree(modules: Mapping[str, int], *, root: str) -> list[Node]:
    """The nodes of all modules, the root first.

    >>> [(n.label, n.num_bytes) for n in module_tree({"bert.pooler": 2, "bert": 1, "": 4}, root="model")]
    [('model', 7), ('bert', 3), ('pooler', 2), ('(outside of modules)', 4)]
    """
    totals: dict[tuple[str, ...], int] = {}
    for path, num_bytes in modules.items():
        parts = tuple(path.split(".")) if path else (OUTSIDE,)
        for depth in range(len(parts) + 1):
            totals[parts[:depth]] = totals.get(parts[:depth], 0) + num_bytes
    children: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for parts in totals:
        if parts:
            children.setdefault(parts[:-1], []).append(parts)
    nodes: list[Node] = []

    def add(parts: tuple[str, ...]) -> None:
        path = "/".join((root, *parts))
        parent = "/".join((root, *parts[:-1])) if parts else ""
        nodes.append(Node(path, parts[-1] if parts else root, parent, totals[parts], _colour(parts)))
        inside = sorted(children.get(parts, ()), key=lambda p: -totals[p])
        kept = sorted(inside[:MAX_CHILDREN], key=_place)
        for child in kept:
            add(child)
        rest = sum(totals[p] for p in inside[MAX_CHILDREN:])
        if rest:
            nodes.append(Node(f"{path}/…", f"{len(inside) - MAX_CHILDREN} more", path, rest, "workspaces"))

    add(())
    return nodes


def _place(parts: tuple[str, ...]) -> tuple[int, int, str]:
    """Modules in the order of a forward pass as far as names tell: embeddings, layers by number, what comes after."""
    name = parts[-1].partition(" × ")[0]
    if name.isdecimal():
        return (1, int(name), name)
    first = ("embeddings", "encoder", "layers", "layer", "attention", "intermediate", "output", "pooler", "head")
    return (first.index(name) if name in first else 9 if name == OUTSIDE else 8, 0, name)


def _colour(parts: tuple[str, ...]) -> str:
    if not parts:
        return "weights"
    if parts[0] == OUTSIDE:
        return "workspaces" if len(parts) == 1 or parts[1] != "optimizer state" else "optimizer"
    return next((colour for name, colour in _COLOURS if name in parts[:2]), "weights")
