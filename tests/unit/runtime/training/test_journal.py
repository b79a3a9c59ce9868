"""The journal: one line a step, and none twice after a resume."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from vramfit.records.run import EvaluationResult
from vramfit.runtime.training.events import Evaluated, Stepped
from vramfit.runtime.training.progress import Journal


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


class Writer:
    """Stands for TensorBoard's."""

    made: ClassVar["list[Writer]"] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.is_closed = folder, purge_step, False
        self.scalars: dict[tuple[str, int], float] = {}
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def close(self) -> None:
        self.is_closed = True


def use(monkeypatch: pytest.MonkeyPatch, writer: Any) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)


def test_figures_go_to_tensorboard_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Writer)
    journal = Journal(tmp_path, from_step=3)
    journal.write(stepped(4))
    result = EvaluationResult(step=4, epoch=0.5, metrics={"accuracy": 0.75, "loss": 0.4}, time_s=1.0, is_best=True)
    journal.write(Evaluated(result=result))
    journal.close()
    (writer,) = Writer.made
    assert (writer.folder, writer.purge_step, writer.is_closed) == (str(tmp_path / "tensorboard"), 4, True)
    found = {name: value for (name, step), value in writer.scalars.items() if step == 4}
    wanted = {"train/loss": 0.5, "train/lr": 1e-4, "eval/accuracy": 0.75, "eval/loss": 0.4}
    assert found | wanted == found
    assert "train/reserved_bytes" not in found


@pytest.mark.parametrize("problem", [ImportError, TypeError("Descriptors cannot be created directly")])
def test_a_tensorboard_that_does_not_work_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], problem: Any
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise problem

    use(monkeypatch, fails)
    journal = Journal(tmp_path, from_step=0)
    journal.write(stepped(1))
    journal.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert capfd.readouterr() == ("", "")
