"""`docs/trainer.md` has the table that `scripts/trainer_gradients.py` makes, and it still holds."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoints.broken import load_script
from tests.unit.runtime.small_models import FAMILIES, HEADS

ROOT = Path(__file__).parents[2]
script: Any = load_script(ROOT / "scripts" / "trainer_gradients.py")


def rows() -> list[list[str]]:
    lines = script.PAGE.read_text(encoding="utf-8").splitlines()
    begin = lines.index(script.HEADER) + 2
    table = [line for line in lines[begin:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_every_head_of_every_family_has_a_row_and_every_fitted_step_is_right() -> None:
    assert [(row[0], row[1]) for row in rows()] == [(task, family) for task in HEADS for family in FAMILIES]
    assert {row[-1] for row in rows()} <= {"< 1e-6", "< 1e-5"}


@pytest.mark.parametrize("task", ["sequence-classification", "question-answering"])
def test_a_row_is_measured_as_it_stands(task: str) -> None:
    line = next(row for row in rows() if row[:2] == [task, "bert"])
    found = script.measure("bert", task)
    assert found.after < 1e-5
    assert found.before == pytest.approx([float(cell.split()[0]) for cell in line[2:-1]], abs=0.02)
