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
from vramfit.records.estimate import Estimate, FitGrid, TimelinePoint
from vramfit.records.plan import Alternative, Plan
from vramfit.records.run import EvaluationResult, RunRecord, StepCourse
from vramfit.report.html import figures
from vramfit.report.html.figures import module_tree, peak_tree, timeline
from vramfit.report.html.page import MAX_BYTES, render_report
from vramfit.report.html.subject import Subject, read_subject
from vramfit.report.words import NO_BREAK
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


def test_layers_that_are_alike_are_one_module() -> None:
    modules = {f"bert.encoder.layer.{n}.output": MIB for n in range(24)}
    nodes = {node.label: node.num_bytes for node in peak_tree(replace(estimate(groups=()), modules=modules))}
    assert nodes["layer × 24"] == nodes["output"] == 24 * MIB
    assert "0" not in nodes


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
    assert set(shown) == {"loss", "speed", "reserved"}  # one score is no curve
    assert shown["loss"]["data"][0]["x"] == list(range(1, 21))
    assert '<th scope="row">20</th><td class="number">0.9</td>' in html
    assert "range" not in shown["loss"]["layout"]["yaxis"]
    assert "NVIDIA H200" in html
    assert "3.00 GiB; predicted 3.00 GiB, at most 3.50 GiB; budget 4.00 GiB" in html


def journal(folder: Path, steps: int, *, evaluated: tuple[int, ...] = (), **changes: Any) -> str:
    """The report of a run with so many lines in its journal."""
    (folder / "run.json").write_text(to_json(run_record(**changes)))
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": n, "loss": 0.7 + n / 1e4, "tokens_per_s": 50.0} for n in range(1, steps + 1)
    ]
    lines += [{"kind": "eval", "step": n, "loss": 0.2, "accuracy": 0.9} for n in evaluated]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return render_report(read_subject(folder))


def test_every_axis_of_a_run_begins_at_zero(tmp_path: Path) -> None:
    shown = drawn(journal(tmp_path, 20, evaluated=(5, 10, 20)))
    assert set(shown) == {"loss", "speed", "scores"}
    for figure in shown.values():
        axis = figure["layout"]["yaxis"]
        assert axis["rangemode"] == "tozero" or axis["range"][0] == 0
    assert shown["scores"]["layout"]["yaxis"]["range"] == [0, 1.05]


def test_few_points_are_a_table_and_not_a_plot_of_lone_dots(tmp_path: Path) -> None:
    html = journal(tmp_path, 2, evaluated=(1, 2))
    assert drawn(html) == {}
    assert '<th scope="row">2</th><td class="number">0.7002</td><td class="number">0.2</td>' in html
    assert '<th scope="row">2</th><td class="number">0.9</td>' in html


@pytest.mark.parametrize(
    ("step_time_s", "said"), [(0.0123, "12.3 ms"), (0.5, "500 ms"), (12.3456, "12.3 s"), (1234.0, "1,234 s")]
)
def test_long_steps_are_told_in_seconds(tmp_path: Path, step_time_s: float, said: str) -> None:
    html = journal(tmp_path, 3, step_time_s=step_time_s, predicted_step_time_s=2 * step_time_s)
    assert f"<td>{said.replace(' ', NO_BREAK)}; predicted " in html


def test_a_run_on_the_emulated_gpu_has_no_times_and_says_why(tmp_path: Path) -> None:
    html = journal(tmp_path, 5, device="emulated", step_time_s=0.85)
    assert "No step times and no throughput: this run was on the emulated GPU" in html
    assert set(drawn(html)) == {"loss"}
    assert "tokens/s" not in html.partition("<script>")[0]
    assert "on the emulated GPU</p>" in html


def test_what_is_left_out_comes_with_a_reason(tmp_path: Path) -> None:
    on_cpu = journal(tmp_path, 5, device="cpu", evaluations=(), step_time_s=0.1)
    assert "No scores: the run was not evaluated during training" in on_cpu
    assert "No reserved memory: this run was on the CPU" in on_cpu
    assert "No predicted step and no map of what fits: there is no plan.json" in on_cpu
    (tmp_path / "metrics.jsonl").unlink()
    assert "No curves of loss and throughput: metrics.jsonl" in render_report(read_subject(tmp_path))
    alone = render_report(Subject(source="x", estimate=estimate(gpu=None)))
    assert "No time of a step: no GPU was named." in alone
    assert "(--no-grid)" in alone
    whole = render_report(Subject(source="x", estimate=estimate(step_time_s=0.1), grid=GRID))
    assert "What is not shown" not in whole


def plan_with(num_alternatives: int, step_time_s: float = 2.0) -> Plan:
    other = Alternative(
        settings="fp32",
        kind="free",
        micro_batch=4,
        accumulate=2,
        step_time_s=step_time_s,
        safe_reserved_bytes=GIB,
        fits=False,
    )
    return Plan(
        workload=staged().workload,
        estimate=staged(),
        evaluation=staged(),
        step_time_s=step_time_s / 2,
        budget_bytes=GIB,
        margin_bytes=0,
        margin_reason="-",
        alternatives=(other,) * num_alternatives,
    )


def test_a_plan_beside_one_other_is_a_table_and_no_plot() -> None:
    for num, is_plotted in ((1, False), (2, True)):
        made = plan_with(num)
        html = render_report(Subject(source="x", plan=made, estimate=made.estimate))
        assert ("alternatives" in drawn(html)) is is_plotted
        assert '<th scope="row">this plan</th>' in html
        assert '<th scope="row">fp32: does not fit</th>' in html
    assert "No other settings" in render_report(Subject(source="x", plan=plan_with(0), estimate=staged()))


def test_the_axis_of_alternatives_is_in_a_unit_that_suits_them() -> None:
    assert figures.alternatives(plan_with(2))["layout"]["xaxis"]["title"]["text"] == "seconds a step"
    short = figures.alternatives(plan_with(2, step_time_s=0.25))
    assert short["layout"]["xaxis"]["title"]["text"] == "milliseconds a step"
    assert short["data"][0]["x"] == [250, 250]


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
    assert "11 with the headroom" in max_batch(margin_batch=11, margin_reason="3% since …")._repr_html_()
    assert "20 steps, completed" in run_record()._repr_html_()
