"""No test depends on how fast a machine is: none reads a clock, bounds a time that was measured, or waits for seconds.

What should not take long is counted (`tests/counting.py`: calls, bytes read; `tests/unit/estimator/counting.py`:
traces, streams), or measured by a script in `benchmarks/`. Waits go through `tests/waiting.py`, whose limits are
minutes. Tests that need a GPU are run by hand, and may compare speeds.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXEMPT = {HERE / "waiting.py", Path(__file__)}
CHECKED = [p for p in sorted(HERE.rglob("*.py")) if p not in EXEMPT and HERE / "gpu" not in p.parents]

CLOCKS = {"time", "timeit", "resource"}
"""Modules that are for nothing else here."""
READINGS = re.compile(r"(?:.*loop(?:\(\))?\.time|(?:.*\.)?(?:datetime|date)\.(?:now|utcnow|today)|os\.times)")
"""What reads one elsewhere."""
IN_A_PAGE = re.compile(r"performance\.now|Date\.now|\.duration\b|\.startTime\b")
A_TIME = re.compile(r"(?:\w*_|\b)(?:s|ms|seconds|milliseconds|elapsed|duration|took|times)")
A_RATE = re.compile(r"\w*(?:per_s|_times)")
SAME_KIND = {"min", "max", "sum", "abs", "float", "round", "mean", "median"}
"""Functions that make times of times."""
WAITS = {"wait": 0, "join": 0, "poll": 0, "wait_for": 1}
"""Methods that wait, and which argument says for how long."""


def faults(source: str) -> list[str]:
    """What in a test depends on the speed of a machine, by line."""
    return [f"line {line}: {what}" for line, what in sorted(set(_faults(ast.parse(source))))]


def _faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported = {node.module}
        else:
            imported = set()
        if imported & CLOCKS:
            yield node.lineno, f"imports {', '.join(sorted(imported & CLOCKS))}"
        if isinstance(node, ast.Call) and READINGS.fullmatch(ast.unparse(node.func)):
            yield node.lineno, f"reads a clock: {ast.unparse(node)}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and IN_A_PAGE.search(node.value):
            yield node.lineno, f"reads a clock of a page: {node.value[:80]}"
        if isinstance(node, ast.Compare) and _bounds_a_time(node):
            yield node.lineno, f"bounds a time: {ast.unparse(node)}"
        if isinstance(node, ast.Call) and any(_is_number(limit, named="_S") for limit in _limits(node)):
            yield node.lineno, f"a limit of its own in place of LIMIT_S: {ast.unparse(node)[:120]}"


def _bounds_a_time(node: ast.Compare) -> bool:
    """Whether something that is named like a time must be below a number."""
    for (left, right), operator in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
        if isinstance(operator, ast.Lt | ast.LtE) and _is_time(left) and _is_number(right):
            return True
        if isinstance(operator, ast.Gt | ast.GtE) and _is_time(right) and _is_number(left):
            return True
    return False


def _is_time(node: ast.expr) -> bool:
    """Something of a time's name, or what is computed from it."""
    if isinstance(node, ast.BinOp):
        return _is_time(node.left) or _is_time(node.right)
    if isinstance(node, ast.Call):
        return _is_time(node.func) or (ast.unparse(node.func) in SAME_KIND and any(map(_is_time, node.args)))
    if isinstance(node, ast.Subscript):
        return _is_time(node.slice) or _is_time(node.value)
    name = getattr(node, "attr", getattr(node, "id", getattr(node, "value", None)))
    return isinstance(name, str) and bool(A_TIME.fullmatch(name)) and not A_RATE.fullmatch(name)


def _is_number(node: ast.expr, named: str = "") -> bool:
    """A number, or made of numbers and of constants that a test gives names to, which end like this."""
    if isinstance(node, ast.BinOp):
        return _is_number(node.left, named) and _is_number(node.right, named)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    return isinstance(node, ast.Name) and node.id.isupper() and node.id.endswith(named) and node.id != "LIMIT_S"


def _limits(node: ast.Call) -> Iterator[ast.expr]:
    """How long a call waits, where it says so."""
    yield from (keyword.value for keyword in node.keywords if keyword.arg == "timeout")
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in WAITS:
        yield from node.args[WAITS[name] :][:1]


@pytest.mark.parametrize("path", CHECKED, ids=lambda path: str(path.relative_to(HERE)))
def test_no_test_depends_on_the_speed_of_a_machine(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time\nbegin = time.process_time()\nassert time.process_time() - begin < 5",
        "from time import perf_counter",
        "from time import monotonic as now",
        "import resource\nresource.getrusage(resource.RUSAGE_CHILDREN)",
        "def test():\n    import timeit",
        "until = loop.time() + 20",
        "until = asyncio.get_running_loop().time() + 20",
        "began = datetime.now()",
        "began = datetime.datetime.now(UTC)",
        "assert survivor.after_s < MAX_WAIT_S",
        "assert max(first.after_s, second.after_s) < MAX_WAIT_S",
        "assert 0 < forward_s < 1",
        "assert 30 >= result['stop_s']",
        "assert min(times) < 150",
        "assert seconds < 2.0 * SLOW",
        "took = page.evaluate(f'{LAST_FIGURE}.duration')",
        "page.evaluate('performance.now()')",
        "process.wait(20)",
        "process.wait(timeout=20)",
        "process.communicate(timeout=60)",
        "subprocess.run(command, timeout=120, check=True)",
        "Barrier(2, timeout=30)",
        "thread.join(5)",
        "asyncio.wait_for(scenario(), 20)",
        "wait(pipes, timeout=TIMEOUT_S)",
    ],
)
def test_what_depends_on_it_is_found(source: str) -> None:
    assert faults(source)


@pytest.mark.parametrize(
    "source",
    [
        "assert one.step_time_s < other.step_time_s",
        "assert 0 < run.compile_s < run.time_s",
        "assert forward_s > 0",
        "assert gpu.bandwidth_bytes_per_s < 10e12",
        "assert len(calls) < 5",
        "process.wait(LIMIT_S)",
        "subprocess.run(command, timeout=LIMIT_S)",
        "', '.join(names)",
        "happened.wait()",
        "page.wait(ANSWERED)",
        "assert median_error(predicted, [case.step_s for case in cases]) <= 0.15",
        "before = RandomState.now()",
        "monkeypatch.setattr(module, 'time', clock)",
        "App(pool, timeout_s=0.02)",
    ],
)
def test_what_does_not_is_left_alone(source: str) -> None:
    assert faults(source) == []
