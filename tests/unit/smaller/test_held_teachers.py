"""Runs whose teacher is in memory beside the student: what they take, how they go on, and when they are chosen."""

import multiprocessing
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.runtime.training.small_runs import run, same_weights, weights, write_model
from tests.unit.runtime.training.test_embedding_runs import pairs
from tests.unit.smaller.test_distillation import distilled, signalled
from tests.waiting import LIMIT_S

import vramfit
from vramfit.errors import VramfitError, WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.records.codec import from_json
from vramfit.records.run import COURSE_FILE, RunRecord, StepCourse
from vramfit.runtime.training import answering
from vramfit.runtime.training.events import Interrupted, Note

HELD = {"teacher_answers": "memory"}
EMULATED = {"device": "emulated", "memory": "64MiB"}


def noted(folder: Path, output: Path, **changes: Any) -> tuple[RunRecord, str]:
    said: list[str] = []
    see = lambda event: said.append(event.text) if isinstance(event, Note) else None  # noqa: E731
    return distilled(folder, output, on_event=see, **changes), "\n".join(said)


@pytest.mark.parametrize("changes", [{}, {"distill": "hidden"}, {"micro_batch": 3}])
def test_a_held_teacher_teaches_what_kept_answers_do(taught: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    held, kept = (
        distilled(taught, tmp_path / where, teacher_answers=where, max_steps=6, **changes)
        for where in ("memory", "disk")
    )
    assert held.train_loss == pytest.approx(kept.train_loss, rel=1e-4)
    assert held.settings["held_teacher"] == str(taught / "teacher")
    assert not (tmp_path / "memory" / "teacher").exists()
    names = set(weights(tmp_path / "memory"))
    assert names == set(weights(tmp_path / "disk"))
    assert not any("teacher" in name for name in names)


@pytest.mark.parametrize("answers", ["logits", "hidden", "relations"])
def test_a_step_beside_a_held_teacher_takes_what_is_predicted_of_it(taught: Path, tmp_path: Path, answers: str) -> None:
    settings = {"batch": 80, "micro_batch": 80, "attention": "eager"}
    record = distilled(taught, tmp_path / "out", distill=answers, max_steps=4, **settings, **EMULATED, **HELD)
    assert record.measured_reserved_bytes is not None
    assert record.predicted_reserved_bytes is not None
    assert record.measured_reserved_bytes <= record.predicted_reserved_bytes
    course = from_json(StepCourse, (tmp_path / "out" / COURSE_FILE).read_text())
    job = {"batch": course.batch, "seq": course.seq, "gpu": "h200", "loop": "stepper", "attention": "eager"}
    held = {"held_teacher": str(taught / "teacher"), "distill": answers, "num_labels": 2}
    predicted = estimate(str(tmp_path / "out" / "student"), optimizer="adamw-fused", **held, **job)
    workspaces = max(p.breakdown.get("workspaces", 0) for p in predicted.timeline)
    most = max(p.requested_bytes for p in predicted.timeline) - workspaces
    assert 0.97 * most <= max(course.requested_bytes) <= most


@pytest.mark.parametrize("answers", ["hidden", "relations"])
def test_memory_that_runs_out_repeats_teacher_and_student(taught: Path, tmp_path: Path, answers: str) -> None:
    settings = EMULATED | HELD | {"distill": answers}
    distilled(taught, tmp_path / "whole", **settings)
    record = distilled(taught, tmp_path / "out", fail_at=(700, 2500), **settings)
    assert record.num_recoveries == 2
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def killed(taught: Path, output: Path, settings: dict[str, Any]) -> None:
    distilled(taught, output, on_event=signalled(5, signal.SIGKILL), **settings)


@pytest.mark.parametrize("device", [{}, EMULATED | {"distill": "relations"}])
def test_a_run_beside_its_teacher_that_was_killed_goes_on_to_the_same_weights(
    taught: Path, tmp_path: Path, device: dict[str, Any]
) -> None:
    settings = HELD | device | {"save_every": 3, "max_steps": 8, "micro_batch": 3}
    child = multiprocessing.get_context("fork").Process(target=killed, args=(taught, tmp_path / "out", settings))
    child.start()
    child.join(LIMIT_S)
    assert child.exitcode == -signal.SIGKILL
    distilled(taught, tmp_path / "out", resume=True, **settings)
    distilled(taught, tmp_path / "whole", **settings)
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def test_a_resumed_run_keeps_its_teacher_where_it_was(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"max_steps": 8}  # of 20 steps a pass over the data
    with pytest.raises(Interrupted):
        distilled(taught, tmp_path / "out", on_event=signalled(3, signal.SIGINT), **short)
    monkeypatch.setattr(answering, "_faster", None)  # nothing is chosen anew
    record = distilled(taught, tmp_path / "out", resume=True, **short)
    assert record.settings["held_teacher"] == str(taught / "teacher")


def test_another_held_teacher_in_the_middle_of_a_run_is_refused(taught: Path, tmp_path: Path) -> None:
    teacher, student = tmp_path / "mine", {"student": str(write_model(tmp_path / "source"))}
    shutil.copytree(taught / "teacher", teacher)
    with pytest.raises(Interrupted):
        distilled(
            taught, tmp_path / "out", teacher=str(teacher), on_event=signalled(3, signal.SIGINT), **HELD, **student
        )
    run(taught, output=str(tmp_path / "other"), max_steps=1)
    shutil.copy(tmp_path / "other" / "model.safetensors", teacher / "model.safetensors")
    with pytest.raises(VramfitError, match=r"the weights of the teacher .* are not those the run began with"):
        distilled(taught, tmp_path / "out", teacher=str(teacher), resume=True, **HELD, **student)


def test_answers_are_kept_on_the_disk_where_every_sample_is_seen(taught: Path, tmp_path: Path) -> None:
    record, said = noted(taught, tmp_path / "out", **EMULATED)
    assert "held_teacher" not in record.settings
    assert "Its answers are kept on the disk" in said


@pytest.mark.parametrize("device", [{}, EMULATED])
def test_a_teacher_is_held_where_the_disk_has_no_room(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: dict[str, Any]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    record, said = noted(taught, tmp_path / "out", **device)
    assert record.settings["held_teacher"] == str(taught / "teacher")
    assert "Its answers would take 1.25 KiB, and the disk has 1000 B free." in said
    with pytest.raises(VramfitError, match="has 1000 B free"):
        distilled(taught, tmp_path / "kept", teacher_answers="disk", **device)


def test_a_teacher_is_held_where_few_samples_are_seen(taught: Path, tmp_path: Path) -> None:
    record, said = noted(taught, tmp_path / "out", max_steps=2, **EMULATED)
    assert record.settings["held_teacher"] == str(taught / "teacher")
    assert "and keeping its answers on the disk" in said
    plan = vramfit.Plan.load(tmp_path / "out" / "plan.json")
    assert plan.workload.held_teacher == str(taught / "teacher")


def test_a_plan_says_where_the_teacher_is(taught: Path, tmp_path: Path) -> None:
    student, plan = str(taught / "source"), tmp_path / "plan.json"
    job = {"batch": 8, "seq": 9, "memory": "64MiB", "num_labels": 2, "distill": "logits"}
    vramfit.plan(student, rehearses=True, held_teacher=str(taught / "teacher"), **job).save(plan)
    planned = EMULATED | {"student": student, "plan": str(plan), "max_steps": 2}
    record = distilled(taught, tmp_path / "out", **planned)
    assert record.settings["held_teacher"] == str(taught / "teacher")
    with pytest.raises(WorkloadError, match="the plan is not for teacher_answers disk"):
        distilled(taught, tmp_path / "kept", teacher_answers="disk", **planned)


def test_what_cannot_be_held_is_refused_with_the_reason(tmp_path: Path) -> None:
    data = str(pairs(tmp_path / "d.csv"))
    write_model(tmp_path / "source")
    run(tmp_path, task="embedding", data=data, output=str(tmp_path / "teacher"), max_steps=1)
    with pytest.raises(WorkloadError, match="teacher_answers memory: the loss compares all texts of a step"):
        distilled(tmp_path, tmp_path / "out", data=data, keep_layers=1, max_steps=1, **HELD)


@pytest.mark.parametrize(
    ("how", "hint"), [(HELD, "take teacher_answers disk"), ({"distill": "relations"}, "take another --distill")]
)
def test_what_to_do_where_it_cannot_be_held(taught: Path, tmp_path: Path, how: dict[str, Any], hint: str) -> None:
    """Relations are not kept on the disk."""
    with pytest.raises(WorkloadError, match="teacher_answers memory: code of the model's own") as error:
        distilled(taught, tmp_path / "out", trust_remote_code=True, max_steps=1, **how)
    assert error.value.hint == hint


def test_the_width_of_a_teacher_in_memory_is_read_from_it() -> None:
    job = {"distill": "hidden", "held_teacher": "bert-mini", "gpu": "t4", "batch": 4, "seq": 32, "loop": "stepper"}
    found, given = (estimate("bert-tiny", **job, **width) for width in ({}, {"distill_width": 256}))
    assert found.peak_requested_bytes == given.peak_requested_bytes
    with pytest.raises(WorkloadError, match="distill_width 999: the hidden size of bert-mini is 256"):
        estimate("bert-tiny", distill_width=999, **job)
