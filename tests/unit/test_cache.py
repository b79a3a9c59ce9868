"""Answers kept between processes: found again, bounded, made again where they are damaged, and never in the way."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import LIMIT_S

from vramfit import cache
from vramfit.cache import folder, remembered
from vramfit.estimator.traced import TracedWorkload
from vramfit.planner import job
from vramfit.planner.plan import plan
from vramfit.records.stream import Origin

ANSWER = Origin("mm", "layer.1", "forward")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


class Maker:
    """Counts how often it is asked."""

    def __init__(self, answer: Any = ANSWER) -> None:
        self.answer, self.num_asked = answer, 0

    def __call__(self) -> Any:
        self.num_asked += 1
        return self.answer


def test_an_answer_is_made_once(kept: Path) -> None:
    make = Maker()
    assert [remembered(Origin, {"batch": 1}, make) for _ in range(3)] == [ANSWER] * 3
    assert make.num_asked == 1
    assert len(list(kept.iterdir())) == 1


def test_another_question_has_another_answer(kept: Path) -> None:
    make = Maker()
    for question in ({"batch": 1}, {"batch": 2}, {"batch": 1, "seq": 3}):
        remembered(Origin, question, make)
    assert make.num_asked == 3


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"schema_version": 1}', b"[1, 2]", b"null"])
def test_a_damaged_answer_is_made_again(kept: Path, damage: bytes) -> None:
    make = Maker()
    remembered(Origin, 1, make)
    (path,) = kept.iterdir()
    path.write_bytes(damage)
    assert remembered(Origin, 1, make) == ANSWER
    assert remembered(Origin, 1, make) == ANSWER
    assert make.num_asked == 2


def test_code_and_releases_belong_to_the_question(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()
    remembered(Origin, 1, make)
    monkeypatch.setattr(cache, "_stamp", lambda: ["another release"])
    remembered(Origin, 1, make)
    assert make.num_asked == 2


def test_what_was_not_asked_for_the_longest_goes_first(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        remembered(Origin, number, Maker())
        newest = max(kept.iterdir(), key=lambda p: p.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    size = newest.stat().st_size
    remembered(Origin, 0, Maker())  # asked for again: now the newest
    monkeypatch.setattr(cache, "MAX_BYTES", 6 * size)
    remembered(Origin, 8, Maker())
    asked = {number: Maker() for number in range(9)}
    total = sum(p.stat().st_size for p in kept.iterdir())
    assert total <= 6 * size
    for number in (0, 8, 1):
        remembered(Origin, number, asked[number])
    assert [asked[number].num_asked for number in (0, 8, 1)] == [0, 0, 1]


@pytest.mark.parametrize("value", ["off", "OFF", "0", "no", ""])
def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(cache.VARIABLE, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make = Maker()
    remembered(Origin, 1, make)
    remembered(Origin, 1, make)
    assert make.num_asked == 2
    assert folder() is None
    assert not list(tmp_path.iterdir())


def test_its_place_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "vramfit" / "answers"


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "kept"))
    assert remembered(Origin, 1, Maker()) == ANSWER


def test_several_processes_share_it(kept: Path) -> None:
    """Each writes and reads the same answers at the same time; none sees half of one."""
    code = (
        "from vramfit.cache import remembered\n"
        "from vramfit.records.stream import Origin\n"
        "for turn in range(40):\n"
        "    for number in range(5):\n"
        "        text = f'm{number}' * 500\n"
        "        found = remembered(Origin, number, lambda: Origin('mm', text, 'forward'))\n"
        "        assert found.module == text\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(LIMIT_S) for process in running] == [0, 0, 0]
    assert len(list(kept.iterdir())) == 5


JOB: dict[str, Any] = {"batch": 8, "seq": 64, "gpu": "t4"}


def traces_counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    real = TracedWorkload.template

    def watched(self: TracedWorkload, micro_batch: int) -> Any:
        seen.append(micro_batch)
        return real(self, micro_batch)

    monkeypatch.setattr(TracedWorkload, "template", watched)
    return seen


def test_a_plan_that_was_made_before_takes_no_trace(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("bert-tiny", **JOB, lengths=[12, 64, 30])
    seen = traces_counted(monkeypatch)
    again = plan("bert-tiny", **JOB, lengths=[12, 64, 30])
    assert again == made
    assert not seen
    for ours, theirs in ((again.estimate, made.estimate), (again.evaluation, made.evaluation)):
        assert ours.snapshot is not None
        assert theirs.snapshot is not None
        assert ours.snapshot() == theirs.snapshot()
    seen.clear()
    assert plan("bert-tiny", **JOB, lengths=[12, 64, 31]).workload.seq == 64
    assert seen


def test_every_keyword_of_a_plan_is_part_of_the_question(kept: Path) -> None:
    plan("bert-tiny", **JOB)
    for more in ({"memory": "1GiB"}, {"exact": True}, {"margin": 0.2}, {"steps": 9}, {"task": "masked-lm"}):
        plan("bert-tiny", **{**JOB, **more})
    assert len(list(kept.iterdir())) == 6


def test_a_calibration_belongs_to_the_question(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan("bert-tiny", **JOB)
    real = job.speed_of
    monkeypatch.setattr(job, "speed_of", lambda gpu: (real(gpu)[0], ("calibrated",)))
    plan("bert-tiny", **JOB)
    assert len(list(kept.iterdir())) == 2


def test_a_plan_of_a_module_is_made_each_time(kept: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    plan(BertForSequenceClassification(BertConfig(**sizes)), **JOB)
    assert not kept.exists() or not list(kept.iterdir())
