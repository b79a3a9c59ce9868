"""The import table of ARCHITECTURE.md, held: a room imports only the rooms its row names."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "vramfit"
EVERYBODY = {"errors", "units", "stages", "tasks", "settings", "workload", "records"}
ROW = re.compile(r"^\| `(?P<room>[a-z_]+)(?:\.py|/)` \|[^|]*\| (?P<allowed>[^|]*) \|$", re.MULTILINE)


def table() -> dict[str, set[str]]:
    """Room → rooms it may import, read from ARCHITECTURE.md."""
    rows = {m["room"]: m["allowed"].strip() for m in ROW.finditer((ROOT / "ARCHITECTURE.md").read_text())}
    allowed = {}
    for room, text in rows.items():
        if text == "–":
            allowed[room] = set()
        elif text.startswith("anything"):
            allowed[room] = set(rows) - set(re.findall(r"`?(\w+)`?", text.removeprefix("anything").replace("but", "")))
        else:
            allowed[room] = {name.strip(" `") for name in text.split(",")}
    return allowed


def rooms_imported(path: Path) -> set[str]:
    """Rooms that a module imports anywhere in it, inside functions and inside code that it runs as text too."""
    names = set()
    tree = ast.parse(path.read_text())
    for node in [*ast.walk(tree), *(node for text in code_as_text(tree) for node in ast.walk(ast.parse(text)))]:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("vramfit.")}


def code_as_text(tree: ast.AST) -> list[str]:
    """Code that a list hands to an interpreter: the text after `-c`."""
    lists = [node.elts for node in ast.walk(tree) if isinstance(node, ast.List)]
    pairs = [pair for items in lists for pair in pairwise(items)]
    texts = [(a.value, b.value) for a, b in pairs if isinstance(a, ast.Constant) and isinstance(b, ast.Constant)]
    return [text for option, text in texts if option == "-c" and "import" in str(text)]


def breaches(room: str, allowed: set[str]) -> list[str]:
    where = SOURCE / room
    files = sorted(where.rglob("*.py")) if where.is_dir() else [where.with_suffix(".py")]
    return [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in files
        for name in sorted(rooms_imported(path) - allowed - EVERYBODY - {room})
        if not name.startswith("__")
    ]


def test_every_room_has_a_row_and_every_row_a_room() -> None:
    rooms = {p.stem for p in SOURCE.iterdir() if p.stem not in ("__init__", "__pycache__", "__main__", "py")}
    assert {p.split(".")[0] for p in rooms} == set(table())


@pytest.mark.parametrize("room", sorted(table()))
def test_a_room_imports_only_what_its_row_allows(room: str) -> None:
    assert breaches(room, table()[room]) == []


def test_the_check_sees_an_import_that_breaks_the_table(tmp_path: Path) -> None:
    module = tmp_path / "bad.py"
    module.write_text("def f():\n    from vramfit.cli import main\n")
    assert rooms_imported(module) == {"cli"}
    module.write_text("import sys\nrun([sys.executable, '-c', 'from vramfit.cli.main import main; main()'])\n")
    assert rooms_imported(module) == {"cli"}


def test_paths_named_in_the_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = set(re.findall(r"`((?:src|tests|docs|scripts|benchmarks)/[\w/.\-]+)`", text))
    assert paths
    assert sorted(p for p in paths if not (ROOT / p).exists()) == []
