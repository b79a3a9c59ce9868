"""Every Triton kernel of fused layers gives what its reference gives; in Triton's interpreter, which needs no GPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None,
    reason="Triton is not installed, which torch for CPUs does not bring: pip install --no-deps triton",
)
NEAR = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
"""A unit in the last place, of the largest number."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the kernels gave in a process whose Triton interprets, which is decided as it is imported."""
    command = [sys.executable, "-m", "tests.unit.techniques.interpreted_kernels"]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert run.returncode == 0, run.stderr
    made: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return made


@pytest.mark.parametrize("dtype", NEAR)
def test_kernels_give_what_their_references_give(dtype: str, found: dict[str, Any]) -> None:
    apart = {name: value for name, value in found["apart"].items() if name.endswith(f" {dtype}")}
    assert len(apart) == 12
    assert {name: value for name, value in apart.items() if not value <= NEAR[dtype]} == {}


def test_dropout_drops_its_share_and_backward_what_forward_dropped(found: dict[str, Any]) -> None:
    dropout = found["dropout"]
    assert dropout["norm dropped"] == pytest.approx(0.25, abs=0.01)
    assert dropout["gate dropped"] == pytest.approx(0.25, abs=0.01)
    assert dropout["norm disagrees"] == dropout["gate disagrees"] == 0
    assert dropout["columns alike"] == pytest.approx(0.75**2 + 0.25**2, abs=0.01)  # drawn apart
