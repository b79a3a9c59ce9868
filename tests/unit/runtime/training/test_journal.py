"""The journal: one line a step, and none twice after a resume."""

import json
import math
from pathlib import Path

from vramfit.runtime.training.events import Stepped
from vramfit.runtime.training.journal import Journal


def stepped(step: int, loss: float = 0.5) -> Stepped:
    return Stepped(
        step=step,
        num_steps=9,
        epoch=step / 9,
        loss=loss,
        lr=1e-4,
        tokens_per_s=10.0,
        num_skipped=0,
        num_recoveries=0,
        num_nonfinite=0,
        loss_scale=None,
        micro_batch=4,
        reserved_bytes=None,
    )


def test_a_resumed_run_writes_on_after_its_checkpoint(tmp_path: Path) -> None:
    first = Journal(tmp_path, from_step=0)
    for step in range(1, 6):
        first.write(stepped(step))
    first.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "train", "st')  # a kill in the middle of a line
    second = Journal(tmp_path, from_step=3)
    second.write(stepped(4, math.inf))
    second.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss"] is None
