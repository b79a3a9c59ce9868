"""A run on several processes: the same model, a rank that is killed, and going on with fewer."""

from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.distributed import runs
from tests.unit.runtime.distributed.launch import Ended, run_ranks
from tests.unit.runtime.training.small_runs import write_classes, write_model

from vramfit.runtime.training.checkpoints import held

MAX_DIFFERENCE = 1e-6
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    write_model(made / "source", **NO_DROPOUT)
    write_classes(made / "train.csv", num_rows=45)
    write_classes(made / "dev.csv", num_rows=12, seed=5)
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one process finds."""
    (found,) = values(run_ranks(runs.run, 1, **asked(folder, "alone")))
    assert found["steps"] == 6
    return dict(found)


def asked(folder: Path, output: str, **more: Any) -> dict[str, Any]:
    """Six steps, the last of an epoch with 13 samples; saved after each."""
    paths = {"model": "source", "data": "train.csv", "eval_data": "dev.csv", "output": output}
    shape = {"device": "cpu", "batch": 16, "micro_batch": 3, "epochs": 2, "lr": 1e-3, "save_every": 1}
    return {name: str(folder / path) for name, path in paths.items()} | shape | more


def values(ended: list[Ended]) -> list[Any]:
    assert [e.trace or e.exit_code for e in ended if e.value is None] == []
    return [e.value for e in ended]


def test_two_processes_save_the_model_of_one_and_only_the_first_speaks(folder: Path, alone: dict[str, Any]) -> None:
    first, second = values(run_ranks(runs.run, 2, **asked(folder, "two")))
    assert runs.difference(folder / "two", folder / "alone") < MAX_DIFFERENCE
    assert runs.difference_of_answers(folder / "two", folder / "alone") < MAX_DIFFERENCE
    assert first["settings"]["num_gpus"] == 2
    assert any("2 processes (ddp)" in text for text in first["said"])
    assert second["said"] == []
    assert first["evaluations"] == [pytest.approx(metrics, rel=1e-4) for metrics in alone["evaluations"]]
    assert first["num_passed"] + second["num_passed"] == alone["num_passed"] == 24
    assert abs(first["num_passed"] - second["num_passed"]) <= 4


def test_processes_that_have_nothing_to_evaluate_wait_for_the_others(folder: Path) -> None:
    write_classes(folder / "one.csv", num_rows=1, seed=5)
    short = asked(folder, "one", eval_data=str(folder / "one.csv"), epochs=1)
    found = values(run_ranks(runs.run, 3, **short))
    assert sorted(made["num_passed"] for made in found) == [0, 0, 1]
    assert found[0]["evaluations"] == found[2]["evaluations"]


def test_a_run_whose_rank_was_killed_goes_on_with_one_rank_fewer(folder: Path, alone: dict[str, Any]) -> None:
    ended = run_ranks(runs.run, 3, killed=1, after=3, **asked(folder, "fewer", parallel="fsdp"))
    assert ended[1].exit_code == -9
    for survivor in (ended[0], ended[2]):
        assert "RankFailed: rank 1 is lost" in survivor.error, survivor
    gone_on = values(run_ranks(runs.run, 2, **asked(folder, "fewer", parallel="ddp", resume=True)))
    assert [found["steps"] for found in gone_on] == [6, 6]
    assert gone_on[0]["sessions"] == 2
    assert runs.difference(folder / "fewer", folder / "alone") < MAX_DIFFERENCE
    assert runs.difference_of_answers(folder / "fewer", folder / "alone") < MAX_DIFFERENCE


def test_an_output_that_is_taken_stops_all_with_one_reason(folder: Path, alone: dict[str, Any]) -> None:
    first, second = run_ranks(runs.run, 2, **asked(folder, "alone"))
    assert "holds a run already" in first.error
    assert second.error.startswith("RankFailed: rank 0 has stopped:")


def test_an_output_that_another_run_writes_into_stops_all_with_one_reason(folder: Path) -> None:
    with held(folder / "busy"):
        first, second = run_ranks(runs.run, 2, **asked(folder, "busy"))
    assert "another process trains into" in first.error
    assert second.error.startswith("RankFailed: rank 0 has stopped:")
