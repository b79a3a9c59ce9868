"""How often things are said: a technique's keyword outside its own module, and how large the house is.

The bounds are what was reached; they may only go down.
"""

import ast
from collections import defaultdict
from pathlib import Path

from vramfit.settings import SETTINGS

SOURCE = Path(__file__).parents[1] / "src" / "vramfit"
MOST_FILES, MOST_LINES, LONGEST, MANY_PARAMETERS = 340, 52_000, 400, 75
MOST_OUTSIDE = {
    "accumulate": 28,
    "precision": 44,
    "attention": 40,
    "checkpointing": 16,
    "freeze": 10,
    "optimizer": 47,
    "lora": 6,
    "quantize": 19,
    "offload": 27,
    "compile": 27,
    "fused": 11,
    "graphs": 12,
    "casts": 1,
    "allocator": 12,
}
"""Keyword of a technique → files outside `settings/` and `techniques/` whose code has it."""


def trees() -> dict[str, ast.Module]:
    return {str(p.relative_to(SOURCE)): ast.parse(p.read_text(encoding="utf-8")) for p in SOURCE.rglob("*.py")}


def files_with_keywords() -> dict[str, set[str]]:
    """Keyword → files that read it, give it or name it in code; prose does not count."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees().items():
        if name.startswith(("settings/", "techniques/")):
            continue
        for node in ast.walk(tree):
            word = getattr(node, "attr", None) or getattr(node, "arg", None) or getattr(node, "value", None)
            if (
                isinstance(node, ast.Attribute | ast.keyword | ast.Constant)
                and isinstance(word, str)
                and word in SETTINGS
            ):
                found[word].add(name)
    return found


def test_a_technique_is_named_in_few_files_outside_its_own() -> None:
    found = files_with_keywords()
    techniques = [s.keyword for s in SETTINGS.values() if s.techniques]
    assert {name: len(found[name]) for name in techniques if len(found[name]) > MOST_OUTSIDE[name]} == {}


def test_the_house_does_not_grow() -> None:
    lines = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCE.rglob("*.py")}
    assert len(lines) <= MOST_FILES
    assert sum(lines.values()) <= MOST_LINES
    assert [str(p) for p, count in lines.items() if count > LONGEST] == []


def test_few_functions_have_many_parameters() -> None:
    functions = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert sum(num_parameters(f) > 5 for f in functions) <= MANY_PARAMETERS


def num_parameters(function: ast.FunctionDef) -> int:
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])
