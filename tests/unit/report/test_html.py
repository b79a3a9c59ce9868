"""Reports as one HTML file, and records as notebooks show them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.report.samples import estimate, max_batch

from vramfit.errors import VramfitError
from vramfit.records.codec import to_data, to_json
from vramfit.records.course import StepCourse
from vramfit.records.estimate import Estimate, TimelinePoint
from vramfit.records.grid import FitGrid
from vramfit.records.plan import Plan
from vramfit.records.run import EvaluationResult, RunRecord
from vramfit.report.html import figures
from vramfit.report.html.modules import module_tree, peak_tree
from vramfit.report.html.page import MAX_BYTES, render_report
from vramfit.report.html.subject import Subject, read_subject
from vramfit.report.html.timeline import timeline
from vramfit.units import GIB, MIB

GRID = FitGrid(
    micro_batches=(1, 2, 4),
    seqs=(128, 256),
    safe_reserved_bytes=((GIB, 2 * GIB), (2 * GIB, 4 * GIB), (4 * GIB, 8 * GIB)),
    fits=((True, True), (True, False), (False, False)),
    capacity_bytes=3 * GIB,
)


def drawn(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    figures: dict[str, Any] = json.loads(found[1])
    return figures


def run_record(**changes: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "model": "bert-base-uncased",
        "model_class": "BertForSequenceClassification",
        "task": "sequence-classification",
        "data": "train.csv",
        "output": "out",
        "device": "cuda:0",
        "status": "completed",
        "num_samples": 100,
        "num_epochs": 2.0,
        "num_steps": 20,
        "final_micro_batch": 8,
        "evaluations": (EvaluationResult(step=20, epoch=2.0, metrics={"accuracy": 0.9}, time_s=1.0),),
        "best_metric": "accuracy",
        "best_value": 0.9,
        "measured_reserved_bytes": 3 * GIB,
        "predicted_reserved_bytes": 3 * GIB + MIB,
        "most_reserved_bytes": 7 * GIB // 2,
        "budget_bytes": 4 * GIB,
        "time_s": 12.0,
        "num_tokens": 1000,
        "tokens_per_s": 83.0,
        "environment": {"torch": "2.11.0", "gpu": "NVIDIA H200"},
    }
    return RunRecord(**{**fields, **changes})


def staged() -> Estimate:
    points = tuple(
        TimelinePoint(part=part, allocated_bytes=3 * MIB, requested_bytes=3 * MIB - 100, breakdown=breakdown)
        for part, breakdown in (
            ("forward", {"weights": MIB, "activations": 2 * MIB}),
            ("backward", {"weights": MIB, "gradients": 2 * MIB}),
        )
    )
    return estimate(timeline=points)


def test_a_report_asks_for_nothing_and_stays_small() -> None:
    html = render_report(Subject(source="x", estimate=estimate(), grid=GRID))
    assert len(html.encode()) < MAX_BYTES
    head = html.partition("<script")[0]
    assert "default-src 'none'" in head
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", html.partition("<script>")[0])
    assert set(drawn(html)) == {"timeline", "modules", "grid"}


def test_what_a_name_holds_cannot_leave_its_place() -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    html = render_report(Subject(source=evil, estimate=estimate(model=evil)))
    assert "<img src=x" not in html.partition("<script>")[0]
    assert drawn(html)["modules"]["data"][0]["labels"][0] == "script><img src=x onerror=alert(1)>"


def test_a_step_is_stacked_by_category_with_the_measurement_over_it() -> None:
    course = StepCourse(
        step=7, device="cuda:0", batch=8, micro_batch=8, seq=512, num_events=3, requested_bytes=(MIB, 3 * MIB, 2 * MIB)
    )
    figure = timeline(staged(), course)
    stacked = {t["name"]: t["y"] for t in figure["data"] if "stackgroup" in t}
    assert set(stacked) == {"weights", "activations", "gradients"}
    assert [sum(column) * GIB for column in zip(*stacked.values(), strict=True)] == pytest.approx(
        [3 * MIB] * 2, rel=0.01
    )
    measured = next(t for t in figure["data"] if t["name"].startswith("measured"))
    assert max(measured["y"]) * GIB == pytest.approx(3 * MIB, rel=0.01)
    html = render_report(Subject(source="x", estimate=staged(), course=course, course_estimate=staged()))
    assert "measured 3.00 MiB, predicted 3.00 MiB (-0.00 %)" in html


def test_modules_are_a_tree_whose_parts_add_up() -> None:
    nodes = module_tree({"bert.layer.0.dense": 4, "bert.layer.1.dense": 5, "bert.layer": 1, "": 2}, root="m")
    sizes = {node.path: node.num_bytes for node in nodes}
    assert sizes["m"] == 12
    assert sizes["m/bert/layer"] == 10
    for node in nodes:
        inside = [n.num_bytes for n in nodes if n.parent == node.path]
        assert sum(inside) <= node.num_bytes
    assert [n.label for n in nodes if n.parent == "m/bert/layer"] == ["0", "1"]


def test_what_belongs_to_no_module_is_named_by_what_it_is() -> None:
    e = estimate()
    outside = sum(g.allocated_bytes for g in e.groups if not g.module)
    modules = {"bert": e.peak_allocated_bytes - outside, "": outside}
    labels = {node.label for node in peak_tree(replace(e, modules=modules))}
    assert {"optimizer state", "cuBLAS workspace"} <= labels


def test_the_border_runs_between_what_fits_and_what_does_not() -> None:
    edges = {(s["x0"], s["y0"], s["x1"], s["y1"]) for s in figures.border(GRID)}
    assert edges == {(0.5, 0.5, 0.5, 1.5), (-0.5, 1.5, 0.5, 1.5), (0.5, 0.5, 1.5, 0.5)}


def test_a_runs_folder_shows_its_course(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(to_json(run_record()))
    lines = [
        {"kind": "train", "step": i, "loss": 1 / i, "tokens_per_s": 50.0, "reserved_bytes": GIB} for i in range(1, 21)
    ]
    lines.append({"kind": "eval", "step": 20, "loss": 0.2, "accuracy": 0.9})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "tra')
    html = render_report(read_subject(tmp_path))
    shown = drawn(html)
    assert set(shown) == {"loss", "scores", "speed", "reserved"}
    assert shown["loss"]["data"][0]["x"] == list(range(1, 21))
    assert shown["scores"]["data"][0]["y"] == [0.9]
    assert shown["scores"]["layout"]["yaxis"]["range"] == [0, 1.05]
    assert "range" not in shown["loss"]["layout"]["yaxis"]
    assert "NVIDIA H200" in html
    assert "3.00 GiB; predicted 3.00 GiB, at most 3.50 GiB; budget 4.00 GiB" in html


def test_scores_out_of_a_hundred_and_few_steps_have_axes_that_suit_them() -> None:
    layout = figures.curve({"f1": ([2, 4], [88.0, 90.0])}, figures.SCORE)["layout"]
    assert "range" not in layout["yaxis"]
    assert layout["xaxis"]["dtick"] == 1
    assert "dtick" not in figures.curve({"loss": ([10, 20], [0.2, 0.1])}, "loss")["layout"]["xaxis"]


def test_a_step_of_the_plans_own_size_lies_over_the_plan(tmp_path: Path) -> None:
    w = staged().workload
    made = Plan(
        workload=w,
        estimate=staged(),
        evaluation=staged(),
        step_time_s=1.0,
        budget_bytes=GIB,
        margin_bytes=0,
        margin_reason="-",
    )
    made.save(tmp_path / "plan.json")
    course = StepCourse(
        step=2, device="cuda:0", batch=w.batch, micro_batch=w.batch, seq=w.seq, num_events=1, requested_bytes=(MIB,)
    )
    for size, lies_over in ((w.seq, True), (w.seq - 1, False)):
        (tmp_path / "step.json").write_text(to_json(replace(course, seq=size)))
        assert (read_subject(tmp_path).course_estimate is not None) == lies_over


def test_a_run_that_is_not_finished_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 0.5}\n')
    assert "has not come to its end" in render_report(read_subject(tmp_path))


def test_an_estimate_is_read_as_the_command_line_prints_it(tmp_path: Path) -> None:
    file = tmp_path / "estimate.json"
    for text in (json.dumps([to_data(estimate())]), json.dumps(to_data(estimate())), to_json(estimate())):
        file.write_text(text)
        assert read_subject(file).estimate == estimate()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds 0 records"),
        ("3", "holds no record but int"),
        ('{"a": 1}', "no record that a report shows"),
        ('{"record": "Estimate", "workload": 3}', "expected an object"),
        ("[" * 100_000, "is not JSON"),
        ("\udc80", "cannot read"),
    ],
)
def test_what_is_no_record_is_an_error_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(VramfitError, match=said):
        read_subject(file)


def test_a_folder_without_a_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(VramfitError, match="holds no run"):
        read_subject(tmp_path)
    with pytest.raises(VramfitError, match="cannot read"):
        read_subject(tmp_path / "nothing.json")


def test_records_show_themselves_in_notebooks() -> None:
    shown = estimate(gpu="k80")._repr_html_()
    assert "<script" not in shown
    assert "<svg" in shown
    assert "activations" in shown
    assert "k80 11.17 GiB" in shown  # what the line in the bar is
    assert "2.00 GiB may be reserved" in estimate(gpu=None, memory="2GiB")._repr_html_()
    assert 'class="budget"' not in estimate(gpu=None)._repr_html_()
    assert "Largest batch: 14" in max_batch()._repr_html_()
    assert "11 with the margin" in max_batch(margin_batch=11, margin_reason="3% since …")._repr_html_()
    assert "20 steps, completed" in run_record()._repr_html_()
