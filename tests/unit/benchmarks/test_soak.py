"""The soak: jobs drawn from a seed, run in processes of their own, and held against the bars."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import soak
import soak_jobs

JOBS = soak_jobs.draw_jobs(soak.SEED, soak.COUNT)


def test_the_same_seed_draws_the_same_jobs_whatever_their_number() -> None:
    assert len(JOBS) == 400
    assert soak_jobs.draw_jobs(soak.SEED, 40) == JOBS[:40]
    assert soak_jobs.draw_jobs(soak.SEED + 1, 40) != JOBS[:40]
    assert len({job["name"] for job in JOBS}) == 400


def test_400_jobs_meet_every_model_task_budget_length_and_technique() -> None:
    assert {job["model"] for job in JOBS} == set(soak_jobs.MODELS)
    assert {job["task"] for job in JOBS} == set(soak_jobs.TASKS)
    assert {job["memory_gib"] for job in JOBS} == set(soak_jobs.MEMORIES_GIB)
    assert {job["lengths"] for job in JOBS} == set(soak_jobs.LENGTHS)
    assert all(any(job["fixed"] == fixed for job in JOBS) for fixed in soak_jobs.TECHNIQUES)


@pytest.mark.parametrize("kind", soak_jobs.LENGTHS)
def test_texts_are_no_longer_than_a_job_allows(kind: str) -> None:
    lengths = soak_jobs.draw_lengths(kind, 128, 200, seed=1)
    assert len(lengths) == 200
    assert 4 <= min(lengths) <= max(lengths) <= 124
    assert lengths == soak_jobs.draw_lengths(kind, 128, 200, seed=1)
    assert (max(lengths) == 124) == (kind != "short")


def test_a_job_runs_in_the_emulated_gpu_and_says_what_it_took(tmp_path: Path) -> None:
    job = soak_jobs.draw_jobs(1, 1, quick=True)[0]
    job |= {"model": "bert-tiny", "task": "token-classification", "memory_gib": 0.25, "seq": 64, "batch": 8}
    outcome = soak.run_job(job | {"fixed": {}, "lengths": "uniform"}, str(tmp_path), "emulated")
    assert outcome["status"] == "done", outcome
    assert 0 < outcome["measured_reserved_bytes"] <= outcome["budget_bytes"] == 2**28
    assert outcome["step_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_a_job_without_a_plan_is_an_outcome_that_names_no_folder(tmp_path: Path) -> None:
    job = soak_jobs.draw_jobs(1, 1, quick=True)[0] | {"model": "bert-tiny", "memory_gib": 0.01, "fixed": {}}
    outcome = soak.run_job(job, str(tmp_path), "emulated")
    assert outcome["status"] == "no plan"
    assert str(tmp_path) not in outcome["why"]


def test_jobs_that_are_there_are_not_run_again_but_for_those_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "soak.jsonl"
    names = [job["name"] for job in soak_jobs.draw_jobs(1, 4, quick=True)]
    statuses = {names[0]: "done", names[1]: "error", names[2]: "no plan"}
    written = [json.dumps({"name": name, "status": status}) for name, status in statuses.items()]
    out.write_text("\n".join([*written, '{"name": "cut']), encoding="utf-8")
    run: list[str] = []

    def in_children(function: Any, cases: Any, **_: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        for case in cases:
            run.append(case[0]["name"])
            yield case, {"status": "refused", "why": "a test"}

    monkeypatch.setattr(soak.forked, "in_children", in_children)
    monkeypatch.setattr(soak.forked, "import_all", lambda: None)
    options = soak._parse(["--seed", "1", "--count", "4", "--quick", "--out", str(out), "--work", str(tmp_path)])
    soak.run_jobs(soak_jobs.draw_jobs(1, 4, quick=True), options)
    assert run == [names[1], names[3]]


def line(name: str, **changes: Any) -> dict[str, Any]:
    usual = {"name": name, "status": "done", "device": "cuda", "num_recoveries": 0, "num_retries": 0, "warnings": []}
    sizes = {"promised_bytes": 100, "measured_reserved_bytes": 90, "predicted_step_s": 1.0, "step_s": 1.02}
    return usual | sizes | changes


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"num_recoveries": 1}, ["1 runs ran out of memory"]),
        ({"status": "out of memory"}, ["1 runs ran out of memory"]),
        ({"num_retries": 2}, ["1 runs with an allocator retry"]),
        ({"measured_reserved_bytes": 101}, ["1 runs reserved more than promised"]),
        ({"step_s": 1.6}, ["1 step times are far off without a warning"]),
        ({"step_s": 0.6}, ["1 step times are far off without a warning"]),
        ({"step_s": 1.6, "warnings": ["memory was short: …"]}, []),
        ({"promised_bytes": None}, []),
    ],
)
def test_a_bar_that_is_not_held_is_named(changes: dict[str, Any], missed: list[str]) -> None:
    lines = [line("a", **changes), *(line(f"b{i}") for i in range(20))]
    assert soak.misses(soak.summarise(lines)) == missed
    assert soak.report(lines) == int(bool(missed))


def test_step_times_that_are_off_in_the_middle_are_a_miss() -> None:
    assert soak.misses(soak.summarise([line(str(i), step_s=1.1) for i in range(9)])) == [
        "the median step time is off by 10.0%"
    ]


def test_runs_without_a_gpu_prove_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.report([line("a", device="emulated")]) == 0
    assert "nothing about a card" in capsys.readouterr().out
