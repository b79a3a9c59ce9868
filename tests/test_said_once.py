"""How often things are said: a technique's keyword outside its own module, and how large the house is.

The bounds are what was reached. A feature may raise them by what it needs, in a commit that says so; otherwise they go
down.

Many words have another meaning too: `re.compile`, the optimizer that a `Stepper` holds, the phase "optimizer".
`denoted` counts what denotes the setting and leaves out the rest by what stands around the word, never by file:

- an attribute that is read counts, whatever it is read from, unless it is called (no setting's value is a function),
  or read from what `NO_SETTINGS` names, or from a `self` whose class assigns it (records of settings are frozen) or
  which is of a class of another package (`self: Any`);
- a keyword counts in calls of `MAKERS`, which make or change workloads, recipes, requests and plans;
- a text counts where it is used as a name: as a key or an element among texts that are all keywords of settings, as an
  index or an argument of `BY_NAME`, before `in`, or compared with something called `name` or `keyword`; not as an index
  of what `NO_SETTINGS` names.
"""

import ast
import importlib
import multiprocessing
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.files_entered import entered_by

from tests.waiting import LIMIT_S
from vramfit.settings import SETTINGS

SOURCE = Path(__file__).parents[1] / "src" / "vramfit"
MOST_FILES, MOST_LINES, LONGEST, MANY_PARAMETERS = 329, 69_105, 400, 29
MOST_OUTSIDE = {
    "accumulate": 5,
    "precision": 5,
    "attention": 5,
    "checkpointing": 3,
    "freeze": 4,
    "optimizer": 5,
    "lora": 4,
    "lora_targets": 0,
    "quantize": 2,
    "offload": 5,
    "compile": 3,
    "fused": 2,
    "graphs": 5,
    "casts": 0,
    "allocator": 3,
}
"""Keyword of a technique → files outside `settings/` and `techniques/` whose code denotes it."""
MAKERS = {"replace", "dict", "from_keywords", "estimate", "plan", "make_plan", "max_batch", "measure", "load", "train"}
"""Functions that take settings as keywords; classes named …Workload, …Recipe, …Request, …Settings, …Proposal do too."""
BY_NAME = {"get", "pop", "setdefault", "getattr", "find", "having", "say", "add"}
"""Functions whose arguments are names of settings."""
NO_SETTINGS = {"trainer", "stepper", "made", "p", "card", "optimizer", "group", "state", "peaks", "segments", "message"}
NO_SETTINGS |= {"_least_peaks", "reached", "Efficiency"}
"""What holds something else by the same word: torch's optimizers and their groups, states that are saved, phases, and
shares of a GPU's speed."""


def trees() -> dict[str, ast.Module]:
    return {str(p.relative_to(SOURCE)): ast.parse(p.read_text(encoding="utf-8")) for p in SOURCE.rglob("*.py")}


def files_with_keywords() -> dict[str, set[str]]:
    """Keyword → files whose code denotes the setting; prose does not count."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees().items():
        if not name.startswith(("settings/", "techniques/")):
            for word, _ in denoted(tree):
                found[word].add(name)
    return found


def denoted(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every place that denotes a setting, as the module's docstring says: its keyword and the line."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in SETTINGS and _reads_setting(node, parents):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and _makes_settings(_name_of(node.func)):
            yield from ((k.arg, k.value.lineno) for k in node.keywords if k.arg in SETTINGS)
        elif _is_keyword(node) and _is_name(node, parents):
            yield node.value, node.lineno


def _reads_setting(node: ast.Attribute, parents: dict[ast.AST, ast.AST]) -> bool:
    above = parents[node]
    if isinstance(node.ctx, ast.Store) or (isinstance(above, ast.Call) and above.func is node):
        return False
    if _name_of(node.value) != "self":
        return _name_of(node.value) not in NO_SETTINGS
    while not isinstance(above, ast.ClassDef):
        if isinstance(above, ast.FunctionDef) and above.args.args and _name_of(above.args.args[0].annotation) == "Any":
            return False
        above = parents[above]
    return not any(
        isinstance(inner, ast.Attribute) and inner.attr == node.attr and isinstance(inner.ctx, ast.Store)
        for inner in ast.walk(above)
    )


def _makes_settings(name: str) -> bool:
    return name in MAKERS or name.endswith(("Workload", "Recipe", "Request", "Settings", "Proposal"))


def _is_name(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    above = parents[node]
    if isinstance(above, ast.Dict | ast.Tuple | ast.List | ast.Set):
        beside = above.keys if isinstance(above, ast.Dict) else above.elts
        texts = [e for e in beside if isinstance(e, ast.Constant) and isinstance(e.value, str)]
        beyond = [e for tuples in _around(above, parents) for e in tuples.elts if isinstance(e, ast.Constant)]
        return node in beside and all(map(_is_keyword, [*texts, *beyond]))
    if isinstance(above, ast.Subscript):
        return node is above.slice and _name_of(above.value) not in NO_SETTINGS | {"Literal"}
    if isinstance(above, ast.Call):
        receiver = above.func.value if isinstance(above.func, ast.Attribute) else None
        return _name_of(above.func) in BY_NAME and _name_of(receiver) not in NO_SETTINGS
    if isinstance(above, ast.Compare):
        is_member = node is above.left and isinstance(above.ops[0], ast.In | ast.NotIn)
        return is_member or any(_name_of(side) in ("name", "keyword") for side in (above.left, *above.comparators))
    return False


def _around(above: ast.AST, parents: dict[ast.AST, ast.AST]) -> list[ast.Tuple]:
    """The tuples of a display of tuples that one is in."""
    display = parents[above]
    return [e for e in display.elts if isinstance(e, ast.Tuple)] if isinstance(display, ast.Tuple | ast.List) else []


def _is_keyword(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in SETTINGS


def _name_of(node: ast.AST | None) -> str:
    """The last name of an expression: `c` for `a.b.c` and for `c[0]`."""
    if isinstance(node, ast.Call | ast.Subscript):
        return _name_of(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_a_technique_is_named_in_few_files_outside_its_own() -> None:
    found = files_with_keywords()
    techniques = [s.keyword for s in SETTINGS.values() if s.techniques]
    assert {name: len(found[name]) for name in techniques if len(found[name]) > MOST_OUTSIDE[name]} == {}


@pytest.mark.parametrize(
    "code",
    [
        'if workload.attention == "packed": ...',
        "chosen = job.base.attention",
        'workload = replace(workload, attention="packed")',
        'Workload(model="m", attention="packed")',
        'given["attention"] = "packed"',
        'if "attention" in given: ...',
        'value = getattr(workload, "attention")',
        'changes = {"attention": "packed", "batch": 1}',
        'for name in ("attention", "precision"): ...',
        'if name == "attention": ...',
        "class Recipe(Base):\n    def is_packed(self): return self.attention",
    ],
)
def test_what_denotes_a_setting_is_seen(code: str) -> None:
    assert "attention" in {word for word, _ in denoted(ast.parse(code))}


@pytest.mark.parametrize(
    "code",
    [
        "pattern = re.compile('a')",
        "model = torch.compile(model)",
        "stepper.optimizer.step()",
        "class Step:\n    def __init__(self, o): self.optimizer = o\n    def step(self): self.optimizer.step()",
        "class Fitted:\n    def step(self: Any): self.optimizer.train_mode",
        'if item.phase == "optimizer": ...',
        'parts = ("forward", "backward", "optimizer")',
        'Phase = Literal["forward", "optimizer"]',
        'if group.get("fused"): ...',
        'moments = state["optimizer"]',
        'kinds = (("allocator", pattern), ("driver", pattern))',
        "stepper = Stepper(model, optimizer=optimizer)",
    ],
)
def test_the_same_word_for_something_else_is_not(code: str) -> None:
    assert list(denoted(ast.parse(code))) == []


def test_the_house_does_not_grow() -> None:
    lines = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCE.rglob("*.py")}
    assert len(lines) <= MOST_FILES
    assert sum(lines.values()) <= MOST_LINES
    assert [str(p) for p, count in lines.items() if count > LONGEST] == []


def test_few_functions_have_many_parameters() -> None:
    """Modules of Triton's kernels and of torch operators are not counted: these take tensors, strides and sizes one by
    one."""
    counted = [tree for tree in trees().values() if not re.search(r"import triton|_library\.define", ast.unparse(tree))]
    functions = [node for tree in counted for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert sum(num_parameters(f) > 5 for f in functions) <= MANY_PARAMETERS


def num_parameters(function: ast.FunctionDef) -> int:
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


@pytest.mark.parametrize(
    ("job", "most_files", "most_frames"), [("estimate", 58, 15), ("train", 83, 0), ("fit_trainer", 96, 30)]
)
def test_few_files_are_passed_through(job: str, most_files: int, most_frames: int) -> None:
    """As `scripts/files_entered.py` counts them; a run on a CPU without a budget traces nothing."""
    others = ("transformers.models.bert.modeling_bert",)  # whose imports need not be looked at
    with multiprocessing.get_context("spawn").Pool(1, importlib.import_module, others) as pool:
        entered, frames = pool.apply_async(entered_by, (job,)).get(LIMIT_S)
    assert (len(entered) <= most_files, len(frames) <= most_frames) == (True, True), [*entered, *frames]
