"""The study run again: its search, its predictions as they were kept, its page and its picture."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import bert_memory_study
import study_picture
import study_predictions
import study_tables
from study_cases import MEMORY, ORIGINAL_BATCH, ORIGINAL_MIB, Case, cases

KEPT = json.loads(study_predictions.PREDICTIONS.read_text(encoding="utf-8"))["cases"]


def test_a_search_finds_a_batch_above_the_first_that_fails() -> None:
    found = bert_memory_study.search(lambda batch: batch <= 223 or batch in (226, 227))
    assert (found["batch"], found["first_edge"]) == (227, 223)
    assert {224, 225, 228} <= set(found["ran_out"])


def test_a_search_where_nothing_runs_gives_none() -> None:
    assert bert_memory_study.search(lambda batch: False)["batch"] == 0


def test_every_figure_of_the_study_has_its_case() -> None:
    made = cases()
    assert len({case.name for case in made}) == len(made)
    shown = {(c.model, c.head, c.seq, c.batch, c.state) for c in made if c.kind == "forward" and c.original}
    assert shown == set(ORIGINAL_MIB)
    batches = [case.original for case in made if case.kind == "largest" and case.original]
    assert sorted(batches) == sorted(ORIGINAL_BATCH.values())


def test_every_case_has_a_prediction_that_is_kept() -> None:
    assert {case.name for case in cases()} == set(KEPT)


@pytest.mark.parametrize("seq", [128, 512])
def test_kept_predictions_are_those_of_today(seq: int) -> None:
    case = Case(kind="forward", model="base", head="classification", seq=seq)
    assert study_predictions.predict_forward(case) == KEPT[case.name]


def test_without_grad_only_outputs_stay_after_a_pass() -> None:
    case = Case(kind="forward", model="base", head="classification", seq=512, batch=8, state="no-grad")
    kept = KEPT[case.name]
    assert kept["after_allocated_bytes"] == 473712640  # measured on an H200: tests/truth/peaks_h200.json
    assert kept["after_allocated_bytes"] < kept["peak_allocated_bytes"]


def test_plans_and_batches_stay_inside_the_card() -> None:
    for case in cases():
        kept = KEPT[case.name]
        if "workload" in kept:
            assert kept["workload"]["memory"] == MEMORY
        if case.kind == "training":
            assert kept["reserved_bytes"] <= MEMORY


def test_the_page_and_the_picture_are_those_of_the_results() -> None:
    known, head = study_tables.read()
    assert study_tables.PAGE.read_text(encoding="utf-8") == study_tables.page(known, head)
    assert study_tables.PICTURE.read_text(encoding="utf-8") == study_picture.draw(study_tables.bars(known))


def test_a_measurement_shows_beside_its_prediction_with_its_error() -> None:
    known, _ = study_tables.read()
    name = Case(kind="forward", model="base", head="classification", seq=512).name
    predicted = known[name][0]
    measured = {key: predicted[key] for key in ("after_allocated_bytes", "peak_allocated_bytes")}
    measured["peak_allocated_bytes"] += 512
    head = {"gpu": "A GPU", "torch": "2.11", "transformers": "5.17", "date": "today"}
    text = study_tables.page({**known, name: (predicted, measured)}, head)
    row = next(line for line in text.splitlines() if line.startswith("| base, classification, 512 × 1, eval |"))
    assert row.split(" | ")[1:] == ["1,237", "900", "900", "902", "902", "-512 B |"]
    assert "A GPU, torch 2.11" in text


def test_the_picture_has_a_mark_for_what_was_measured() -> None:
    bar = study_picture.Bar(
        group="eager", label="512", parts={"fixed": 2**28, "square _softmax": 2**27}, measured_bytes=2**28 + 2**27,
        original_bytes=None,
    )  # fmt: skip
    drawn = ElementTree.fromstring(study_picture.draw([bar]))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"256", "128", "measured; the bars are predicted"} <= set(texts)
