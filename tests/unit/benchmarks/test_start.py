"""Starts: both programs run small jobs, turns that are there are not run again, and medians are of both sides."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import start
from tests.waiting import LIMIT_S

SMALL = ["--small", "--device", "cpu", "--cases", "rte", "--turns", "1"]


def test_both_programs_run_and_a_turn_that_is_there_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*SMALL, "--out", str(tmp_path / "start.jsonl"), "--timeout-s", str(LIMIT_S)]
    assert start.main(arguments) == 0
    (line,) = [json.loads(text) for text in (tmp_path / "start.jsonl").read_text().splitlines()]
    for side in start.SIDES:
        assert 0 < line[side]["first_step_s"] < line[side]["whole_s"]
    assert line["trainer"]["micro_batch"] == line["vramfit"]["settings"]["batch"]
    assert line["torch"]
    assert "rte, medians of 1, vramfit against the Trainer: first_step_s" in capsys.readouterr().out
    monkeypatch.setattr(start, "run_turn", lambda *_: pytest.fail("it is there already"))
    assert start.main(arguments) == 0
    capsys.readouterr()
    assert start.main([*arguments, "--turns", "2", "--limit-s", "0.001"]) == 0
    assert "rte, turn 1: left for another call" in capsys.readouterr().out


def test_medians_are_of_the_turns_that_came_through() -> None:
    def line(ours: float, theirs: float) -> dict[str, Any]:
        sides = {"vramfit": ours, "trainer": theirs}
        return {s: {"first_step_s": t, "whole_s": 10 * t, "reserved_bytes": None} for s, t in sides.items()}

    told = start.summary("imdb", [line(1.0, 4.0), line(2.0, 4.0), line(9.0, 5.0), {"error": "exit 1"}])
    assert told.endswith("first_step_s 2.0 against 4.0 (0.50); whole_s 20.0 against 40.0 (0.50)")
    assert start.summary("imdb", [{"error": "exit 1"}]) == "imdb: no turn came through"


def test_the_trainer_gets_half_as_many_samples_a_pass_where_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(command: list[str], timeout_s: float) -> tuple[int, dict[str, float], str, str]:
        asked.append(json.loads(Path(command[-1]).read_text())["micro_batch"])
        return (start.OUT_OF_MEMORY if asked[-1] > 16 else 0), {"first_step_s": 1.0}, '{"reserved_bytes": 5}', ""

    monkeypatch.setattr(start, "run_program", run)
    options = Namespace(device="cpu", timeout_s=LIMIT_S)
    made = start.run_trainer(start.CASES[0], 64, options, tmp_path / "output")
    assert asked == [64, 32, 16]
    assert made == {"first_step_s": 1.0, "reserved_bytes": 5, "micro_batch": 16}


@pytest.mark.parametrize(
    ("code", "timeout_s", "said"),
    [("print('done')", LIMIT_S, "never said"), ("import time; time.sleep(600)", 0.2, "took longer than 0 s")],
)
def test_a_program_without_a_first_step_is_an_error(code: str, timeout_s: float, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        start.run_program([sys.executable, "-c", code], timeout_s)
