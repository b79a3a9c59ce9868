"""Bytes by module path as a tree, every node with the sum of what is below it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vramfit.records.estimate import Estimate
from vramfit.report.words import group_name

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
