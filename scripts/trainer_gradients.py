"""What a step of the real Trainer is, beside that of the whole batch, before and after `fit_trainer`.

Small models of every family with every head, no dropout; an effective batch of 16 in 2, 4 and 8 passes, and a last step
of 5 samples. The table goes into `docs/trainer.md`. Run from the repository: python scripts/trainer_gradients.py
"""

import argparse
import contextlib
import io
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.unit.integrations.small_trainers import difference, gradients_of, make_trainer, whole_gradient
from tests.unit.runtime.small_models import FAMILIES, HEADS, make_batch

from vramfit.integrations.trainer import fit_trainer

PAGE = Path(__file__).parents[1] / "docs" / "trainer.md"
BATCH, SIZE = 16, 21
PASSES = (2, 4, 8)
HEADER = "| head | family | 2 passes | 4 passes | 8 passes | last step, 4 passes | largest difference, fitted |"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One head of one family."""

    family: str
    task: str
    before: tuple[float, ...]
    """Length of the plain Trainer's step, in steps of the whole batch: in 2, 4 and 8 passes, and the last one."""
    after: float
    """The largest relative difference of a fitted step, whole or last, in any number of passes."""

    def line(self) -> str:
        """As on the page."""
        before = " | ".join(f"{ratio:.2f} ×" for ratio in self.before)
        return f"| {self.task} | {self.family} | {before} | {ceiling(self.after)} |"


def ceiling(value: float) -> str:
    """The power of ten it stays below: rounding differs from one processor to the next."""
    return next(f"< 1e-{n}" for n in (6, 5, 4, 3, 2, 1, 0, -1, -2) if value < 10.0**-n)


def measure(family: str, task: str) -> Row:
    """Run both Trainers."""
    batch = make_batch(task, SIZE)
    windows = [{n: v[:BATCH] for n, v in batch.items()}, {n: v[BATCH:] for n, v in batch.items()}]
    right = [whole_gradient(family, task, window) for window in windows]
    ratios, last, worst = [], 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for num_passes in PASSES:
            settings = {"per_device_train_batch_size": BATCH // num_passes, "gradient_accumulation_steps": num_passes}
            settings |= {"learning_rate": 0.0, "max_grad_norm": 0.0, "size": SIZE}
            plain = gradients_of(make_trainer(Path(folder), family, task, **settings))
            trainer = make_trainer(Path(folder), family, task, **settings)
            fit_trainer(trainer, memory="1GiB", micro_batch=BATCH // num_passes, show=False)
            fitted = gradients_of(trainer)
            ratios.append(float(plain[0].norm() / right[0].norm()))
            if num_passes == 4:
                last = float(plain[1].norm() / right[1].norm())
            worst = max(worst, *(difference(found, whole) for found, whole in zip(fitted, right, strict=True)))
    return Row(family=family, task=task, before=(*ratios, last), after=worst)


def main() -> None:
    """Measure everything, and put the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    lines = [HEADER, "|---|---|---|---|---|---|---|"]
    for task in HEADS:
        for family in FAMILIES:
            lines.append(measure(family, task).line())
            print(lines[-1], flush=True)
    text = PAGE.read_text(encoding="utf-8")
    table = re.compile(re.escape(HEADER) + r"\n(?:\|.*\n)*")
    assert table.search(text), f"{PAGE} has no such table"
    PAGE.write_text(table.sub("\n".join(lines) + "\n", text), encoding="utf-8")


if __name__ == "__main__":
    main()
