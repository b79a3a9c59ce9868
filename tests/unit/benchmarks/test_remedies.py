"""Remedies: the rule that judges them, their page, and a quick run of two on an emulated GPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import fine_tuning
import folklore
import forked
import held as held_runs
import remedies
import remedy_tables
from remedy_cases import DATASETS, REMEDIES

from vramfit.planner.choose import margin_of
from vramfit.runtime.training.session import Session
from vramfit.workload import Workload

NOTHING: dict[str, Any] = {"minilm": {}}
"""Predicted."""


@pytest.mark.parametrize(
    ("saved", "times", "scores", "told"),
    [
        (0.4, 1.2, [89.0, 90.0], "worth it"),
        (0.4, 1.6, [89.0, 90.0], "slow"),
        (0.4, 1.0, [80.0, 81.0], "costs 9.5 points"),
        (0.99, 1.0, [90.0, 90.0], "saves less than 5%"),
        (1.3, 2.0, [90.0, 90.0], "takes 30% more, slow"),
        (0.4, None, [88.5, 90.5], "not timed"),
        (0.4, 1.0, [80.0], "10.0 points less with one seed"),
    ],
)
def test_the_rule_names_what_a_remedy_costs(saved: float, times: float | None, scores: list[float], told: str) -> None:
    assert remedy_tables.verdict(saved, times, scores, [89.5, 90.5]) == told


def test_nothing_is_judged_before_it_is_measured() -> None:
    assert remedy_tables.verdict(None, None, [], []) == "–"


def test_the_page_is_that_of_the_results() -> None:
    assert remedy_tables.PAGE.read_text(encoding="utf-8") == remedy_tables.page(*remedy_tables.read())


def test_every_remedy_has_its_prediction_on_each_of_its_data_sets() -> None:
    predicted, _ = remedy_tables.read()
    assert {name: set(rows) for name, rows in predicted["minilm"].items()} == {
        dataset: {remedy.name for remedy in REMEDIES if dataset in remedy.datasets} for dataset in DATASETS
    }


def line(remedy: str, reserved: int, step_s: float, accuracy: float, seed: int) -> dict[str, Any]:
    run = {"measured_reserved_bytes": reserved, "step_time_s": step_s, "metrics": {"accuracy": accuracy}}
    head = {"gpu": "A GPU", "torch": "2.11", "transformers": "5.17", "date": "today", "model": "minilm"}
    return {
        **head,
        "remedy": remedy,
        "dataset": "sst2",
        "seed": seed,
        "timed": seed == 0,
        "run": run,
        "whole_step_s": 0.02,
    }


def test_a_row_shows_shares_and_the_spread_over_seeds() -> None:
    lines = [line("fp32", 2**30, 0.02, 0.90, 0), line("fp32", 2**30, 9.0, 0.91, 1)]
    lines += [line("checkpointing", 2**29, 0.025, 0.89, 0), line("checkpointing", 2**29, 9.0, 0.91, 1)]
    text = remedy_tables.page(NOTHING, lines)
    row = next(row for row in text.splitlines() if row.startswith("| checkpointing"))
    assert row.split(" | ")[3:] == ["512 (50%)", "–", "25 ms", "1.25×", "90.0 (89.0–91.0, 2)", "worth it |"]
    assert "A GPU, torch 2.11" in text


def test_a_step_is_held_against_fp32_of_the_same_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts differ from call to call; a case that ran again stands as it last ran."""
    calls = {
        "first": [line("fp32", 100, 0.02, 0.9, 0), line("LoRA", 50, 0.03, 0.8, 0), line("Adafactor", 50, 0.03, 0.8, 0)],
        "second": [line("fp32", 100, 0.04, 0.9, 0), line("LoRA", 50, 0.03, 0.8, 0)],
    }
    for name, lines in calls.items():
        text = "".join(json.dumps(n | {"name": n["remedy"]}) + "\n" for n in lines)
        (tmp_path / f"remedies_{name}.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setattr(remedy_tables, "RESULTS", tmp_path)
    rows = remedy_tables.summary("sst2", {name: name for name in ("fp32", "LoRA", "Adafactor")})
    assert [row[-1] for row in rows] == ["1.00×", "0.75×", "1.50×"]


def held(reserved: int, predicted: int, budget: int | None = None) -> dict[str, Any]:
    made = line("checkpointing", reserved, 0.02, 0.9, 0) | {"name": "a" if budget is None else "a held"}
    made["run"] |= {"predicted_reserved_bytes": predicted, "budget_bytes": budget, "num_recoveries": 0}
    return made | ({"held": True, "timed": False} if budget is not None else {})


def test_a_run_inside_its_budget_stands_for_the_one_that_had_room() -> None:
    free, inside = held(900 * 2**20, 500 * 2**20), held(512 * 2**20, 500 * 2**20, 560 * 2**20)
    inside["run"]["num_alloc_retries"] = 7
    lines = [line("fp32", 2**30, 0.02, 0.90, 0), free, inside]
    text = remedy_tables.page(NOTHING, lines)
    row, beside = (row for row in text.splitlines() if "| checkpointing |" in row)
    assert row.split(" | ")[3:] == ["512 (50%) ⊡", "–", "20 ms", "1.00×", "90.0 (90.0–90.0, 1)", "worth it |"]
    assert beside == "| sst2 | checkpointing | 500 | 900 | 560 | 512 | 7 | 0 | 90.0 | 90.0 |"
    assert "None exceeded its budget." in text


def test_a_run_that_passed_its_budget_is_counted() -> None:
    free, inside = held(900 * 2**20, 500 * 2**20), held(563 * 2**20, 500 * 2**20, 560 * 2**20)
    inside["run"]["num_alloc_retries"] = 7
    text = remedy_tables.page(NOTHING, [free, inside])
    assert "1 of 1 exceeded the budget, by 3 MiB at most" in text.replace("\n", " ")


def test_a_run_that_ended_for_want_of_memory_is_shown() -> None:
    said = "Training: 9 steps, batch 8, fp32. | Error: one sample of 9 tokens does not fit, after 2 tries |   → free"
    failed = {**line("checkpointing", 0, 0.0, 0.0, 0), "error": said}
    del failed["run"]
    predicted = {"checkpointing": {"reserved_bytes": 2**20, "step_s": 0.02}}
    text = remedy_tables.page({"minilm": {"sst2": predicted}}, [failed])
    assert "| – | – | – | ran out of memory |" in text
    assert "*Checkpointing*: batch 8, fp32. It stopped: one sample of 9 tokens does not fit, after 2 tries." in text


@pytest.mark.parametrize(("measured", "over"), [(100, False), (101, False), (102, True)])
def test_what_took_more_than_predicted_is_held_to_it(measured: int, over: bool) -> None:
    assert held_runs.is_over(held(measured, 100)) is over
    assert not held_runs.is_over(held(measured, 100, 120))
    assert not held_runs.is_over({"folklore": "advice", "run": {}})


@pytest.mark.parametrize("predicted", [300 * 2**20, 2**30, 40 * 2**30])
def test_the_least_budget_leaves_the_usual_margin_and_no_more(predicted: int) -> None:
    workload = Workload(model="bert-base-uncased", batch=1, seq=1, allocator="expandable")
    least = held_runs.least_bytes(predicted)
    for budget, fits in ((least, True), (least - 2 * 2**20, False)):
        margin = margin_of(budget, "verified", workload, varied=True)
        assert (budget - margin.num_bytes >= predicted) is fits


def test_timed_runs_have_the_gpu_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []

    def rehearse(session: Any, checkpoint: Any) -> None:
        taken.append(not forked.GPU.acquire(block=False))

    monkeypatch.setattr(Session, "rehearse", rehearse)
    with fine_tuning._alone():
        Session.rehearse(None, None)  # type: ignore[arg-type]
    assert taken == [True]
    assert forked.GPU.acquire(block=False)
    forked.GPU.release()


def test_folklore_has_a_row_each() -> None:
    assert set(remedy_tables.SHOWN) == set(folklore.FOLKLORE)


def test_a_remedy_and_a_piece_of_advice_run_on_an_emulated_gpu(tmp_path: Path) -> None:
    (tmp_path / "sst2").mkdir()
    rows = ["sentence\tlabel", *(f"{word} film\t{n % 2}" for n, word in enumerate(["dull", "fine"] * 24))]
    for name in ("train", "dev"):
        (tmp_path / "sst2" / f"{name}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    always = ["--data", str(tmp_path), "--quick", "--out", str(out), "--limit-s", "200"]
    for only in ("sst2 checkpointing", "quantization_config"):
        assert remedies.main([*always, "--only", only]) == 0, out.read_text(encoding="utf-8")[-3000:]
    trained, advice = (json.loads(text) for text in out.read_text(encoding="utf-8").splitlines())
    assert trained["run"]["settings"]["checkpointing"] == "full"
    assert trained["run"]["measured_reserved_bytes"] > 0
    assert advice["run"]["ran"] is False
    assert remedies.main([*always, "--only", "sst2 checkpointing"]) == 0
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2  # it is not run again
