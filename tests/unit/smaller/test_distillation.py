"""Distillation end to end on the CPU and on an emulated GPU: every task, and whatever may come between."""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.unit.runtime.training.small_runs import (
    BAD,
    GOOD,
    run,
    same_weights,
    weights,
    write_model,
    write_questions,
    write_tags,
)
from tests.unit.runtime.training.test_embedding_runs import pairs
from tests.waiting import LIMIT_S
from transformers import AutoConfig, BertTokenizer

import vramfit
from vramfit.errors import CheckpointError, DataError, VramfitError, WorkloadError
from vramfit.estimator.predict import estimate
from vramfit.records.codec import from_json
from vramfit.records.run import COURSE_FILE, RunRecord, StepCourse
from vramfit.runtime.trained import open_model
from vramfit.runtime.training import teacher as teachers
from vramfit.runtime.training.events import Event, Interrupted, Note, Stepped
from vramfit.runtime.training.teacher import fingerprint

USUAL = {"epochs": 2, "batch": 8, "lr": 3e-3, "device": "cpu"}


def distilled(folder: Path, output: Path, **changes: Any) -> RunRecord:
    settings: dict[str, Any] = USUAL | {"data": str(folder / "train.csv")} | changes
    return vramfit.distill(settings.pop("teacher", str(folder / "teacher")), output=str(output), **settings)


def signalled(step: int, number: signal.Signals) -> Callable[[Event], None]:
    def see(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == step:
            os.kill(os.getpid(), number)

    return see


def test_half_of_the_layers_learn_what_the_teacher_knows(taught: Path, tmp_path: Path) -> None:
    said: list[str] = []
    record = distilled(
        taught,
        tmp_path / "out",
        eval_data=str(taught / "dev.csv"),
        epochs=4,
        on_event=lambda event: said.append(event.text) if isinstance(event, Note) else None,
    )
    assert record.best_value is not None
    assert record.best_value >= 0.9
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.num_hidden_layers, config.id2label) == (2, {0: "bad", 1: "good"})
    assert "The student has 2 of the teacher's 4 layers, counted from 0: 0, 3." in said
    assert any("kept on the disk (1.25 KiB)" in text for text in said)
    assert not (tmp_path / "out" / "teacher").exists()  # nothing is left to learn from them


def test_a_teacher_that_errs_is_followed(taught: Path, tmp_path: Path) -> None:
    """With alpha 1 the labels count nothing: a student of a teacher whose classes were swapped swaps them too."""
    swapped = tmp_path / "swapped"
    (tmp_path / "wrong.csv").write_text(
        (taught / "train.csv").read_text().replace(",good", ",x").replace(",bad", ",good").replace(",x", ",bad")
    )
    run(taught, data=str(tmp_path / "wrong.csv"), output=str(swapped), epochs=6, lr=3e-3)
    right = {"teacher": str(swapped), "distill_alpha": 1.0, "epochs": 4, "eval_data": str(taught / "dev.csv")}
    assert distilled(taught, tmp_path / "out", **right).evaluations[-1].metrics["accuracy"] <= 0.1


@pytest.mark.parametrize(
    ("task", "write", "changes"),
    [
        ("token-classification", write_tags, {"distill": "hidden"}),
        ("question-answering", write_questions, {"distill": "hidden"}),
        ("embedding", pairs, {}),
        ("reranking", lambda path: pairs(path, negatives=2), {}),
    ],
)
def test_every_task_is_distilled(tmp_path: Path, task: str, write: Any, changes: dict[str, Any]) -> None:
    data = str(write(tmp_path / ("d.csv" if write not in (write_tags, write_questions) else "d.jsonl")))
    run(tmp_path, task=task, data=data, output=str(tmp_path / "teacher"), epochs=1, lr=3e-3)
    settings: dict[str, Any] = {"data": data, "keep_layers": 1, "max_steps": 4, "micro_batch": 3} | changes
    plain = distilled(tmp_path, tmp_path / "plain", **settings)
    small = distilled(tmp_path, tmp_path / "small", **settings | {"device": "emulated", "memory": "64MiB"})
    assert plain.task == task
    assert plain.train_loss == pytest.approx(small.train_loss, rel=1e-4)
    assert small.predicted_reserved_bytes is not None
    assert small.measured_reserved_bytes is not None
    assert small.measured_reserved_bytes <= small.predicted_reserved_bytes


@pytest.mark.parametrize("changes", [{"distill": "hidden"}, {"micro_batch": 3, "distill_alpha": 1.0}])
def test_an_interrupted_distillation_goes_on_to_the_same_weights(
    taught: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    distilled(taught, tmp_path / "whole", **changes)
    for step in (1, 9):
        with pytest.raises(Interrupted, match=f"after step {step}"):
            distilled(taught, tmp_path / "out", resume=True, on_event=signalled(step, signal.SIGINT), **changes)
    distilled(taught, tmp_path / "out", resume=True, **changes)
    assert same_weights(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("answers", ["logits", "hidden"])
def test_a_step_with_a_teacher_takes_what_is_predicted_of_it(taught: Path, tmp_path: Path, answers: str) -> None:
    student = str(write_model(tmp_path / "source", hidden_size=64, intermediate_size=64))
    settings = {"batch": 80, "micro_batch": 80, "attention": "eager", "device": "emulated", "memory": "64MiB"}
    distilled(taught, tmp_path / "out", student=student, distill=answers, max_steps=4, **settings)
    course = from_json(StepCourse, (tmp_path / "out" / COURSE_FILE).read_text())
    job = {"batch": course.batch, "seq": course.seq, "gpu": "h200", "loop": "stepper", "attention": "eager"}
    width = {"distill_width": 32} if answers == "hidden" else {}
    predicted = estimate(student, optimizer="adamw-fused", num_labels=2, distill=answers, **width, **job)
    workspaces = max(p.breakdown.get("workspaces", 0) for p in predicted.timeline)
    most = max(p.requested_bytes for p in predicted.timeline) - workspaces
    assert 0.97 * most <= max(course.requested_bytes) <= most


def test_memory_that_runs_out_changes_nothing(taught: Path, tmp_path: Path) -> None:
    settings = {"device": "emulated", "memory": "64MiB", "distill": "hidden"}
    distilled(taught, tmp_path / "whole", **settings)
    record = distilled(taught, tmp_path / "out", fail_at=(900, 2500), **settings)
    assert record.num_recoveries == 2
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def killed_while_asked(taught: Path, output: Path, settings: dict[str, Any]) -> None:
    """The process ends in the third part of the answers, when some of them are written."""
    add = teachers.Answers.add

    def kill(self: Any, parts: Any) -> None:
        if self.manifest.num_done == 60:
            (output / "teacher" / "teacher_logits.bin").open("ab").write(b"half of a part")
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, parts)

    teachers.Answers.add = kill  # type: ignore[method-assign]
    distilled(taught, output, **settings)


def killed_in_training(taught: Path, output: Path, settings: dict[str, Any]) -> None:
    distilled(taught, output, resume=True, on_event=signalled(5, signal.SIGKILL), **settings)


def test_a_distillation_that_was_killed_goes_on_to_the_same_weights(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"distill": "hidden", "save_every": 3, "max_steps": 8, "teacher_answers": "disk"}
    monkeypatch.setattr(teachers, "MAX_PART", 30)
    kept: list[int] = []
    for kill in (killed_while_asked, killed_in_training):
        child = multiprocessing.get_context("fork").Process(target=kill, args=(taught, tmp_path / "out", settings))
        child.start()
        child.join(LIMIT_S)
        assert child.exitcode == -signal.SIGKILL
        manifest = json.loads((tmp_path / "out" / "teacher" / "manifest.json").read_text())
        kept.append(manifest["num_done"])
    assert kept == [60, 160]
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir()) == ["step-00000003"]
    distilled(taught, tmp_path / "out", resume=True, **settings)
    distilled(taught, tmp_path / "whole", **settings)
    assert same_weights(tmp_path / "whole", tmp_path / "out")


def test_a_student_with_another_tokenizer_is_refused(taught: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *reversed((*GOOD, *BAD))]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(other)
    with pytest.raises(WorkloadError, match=r"their tokenizers differ \(17 tokens and 32") as caught:
        distilled(taught, tmp_path / "out", student=str(other))
    assert "--keep-layers" in str(caught.value.hint)
    assert not (tmp_path / "out" / "teacher").exists()


def test_a_student_with_other_labels_is_refused(taught: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed.csv"
    renamed.write_text((taught / "train.csv").read_text().replace(",good", ",yes").replace(",bad", ",no"))
    run(taught, data=str(renamed), output=str(tmp_path / "student"), max_steps=1)
    with pytest.raises(WorkloadError, match="its labels are no, yes, and the teacher's bad, good"):
        distilled(taught, tmp_path / "out", student=str(tmp_path / "student"))
    with pytest.raises(DataError, match="yes"):
        distilled(taught, tmp_path / "out", data=str(renamed))


def test_a_student_of_another_width_learns_a_projection_that_is_not_saved(taught: Path, tmp_path: Path) -> None:
    small = {"student": str(write_model(tmp_path / "small", hidden_size=16)), "distill": "hidden", "max_steps": 8}
    emulated = {"device": "emulated", "memory": "64MiB"}
    record = distilled(taught, tmp_path / "whole", **small, **emulated)
    assert record.settings["distill_width"] == 32
    with pytest.raises(Interrupted):
        distilled(taught, tmp_path / "out", **small, **emulated, on_event=signalled(3, signal.SIGINT))
    saved = load_file(tmp_path / "out" / "checkpoints" / "step-00000003" / "weights.safetensors")
    assert saved["teacher_projection.weight"].shape == (32, 16)
    distilled(taught, tmp_path / "out", **small, **emulated, resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "out")
    assert not any("projection" in name for name in weights(tmp_path / "out"))
    assert AutoConfig.from_pretrained(tmp_path / "out").hidden_size == 16


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"keep_layers": 4}, "keep_layers 4: the teacher has 4 layers, and a student has fewer"),
        ({"keep_layers": (0, 9)}, "keep_layers 0,9: the teacher's layers are numbered from 0 to 3"),
        ({"keep_layers": (0, 0, 2)}, "keep_layers 0,0,2 names a layer twice"),
        ({"keep_layers": 2, "student": "x"}, "both say what the student is"),
        ({"distill_alpha": 1.5}, "distill_alpha 1.5"),
        ({"label_smoothing": 0.1}, "label_smoothing and a teacher do not go together"),
    ],
)
def test_what_cannot_be_is_said_before_any_work(
    taught: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(WorkloadError, match=problem):
        distilled(taught, tmp_path / "out", **changes)
    assert not (tmp_path / "out" / "student").exists()


def test_a_plan_without_a_teacher_is_not_for_a_student(taught: Path, tmp_path: Path) -> None:
    student, plan = str(taught / "source"), tmp_path / "plan.json"
    vramfit.plan(student, batch=8, seq=9, memory="64MiB", num_labels=2, rehearses=True).save(plan)
    with pytest.raises(WorkloadError, match="the plan is for no teacher, not distill logits"):
        distilled(taught, tmp_path / "out", student=student, plan=str(plan), device="emulated", memory="64MiB")


def test_a_teacher_without_a_head_is_refused(taught: Path, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, WorkloadError)):
        distilled(taught, tmp_path / "out", teacher=str(taught / "source"))


def test_checkpoints_of_its_run_do_not_make_another_teacher(taught: Path, tmp_path: Path) -> None:
    teacher = shutil.copytree(taught / "teacher", tmp_path / "mine")
    shutil.rmtree(teacher / "checkpoints", ignore_errors=True)
    before = fingerprint(open_model(str(teacher)))
    (teacher / "checkpoints").mkdir()
    (teacher / "checkpoints" / "more.safetensors").write_bytes(b"of a run")
    assert fingerprint(open_model(str(teacher))) == before


def test_another_teacher_in_the_middle_of_a_run_is_refused(taught: Path, tmp_path: Path) -> None:
    teacher, student = tmp_path / "mine", {"student": str(tmp_path / "out" / "student")}
    shutil.copytree(taught / "teacher", teacher)
    with pytest.raises(Interrupted):
        distilled(taught, tmp_path / "out", teacher=str(teacher), on_event=signalled(3, signal.SIGINT))
    run(taught, output=str(tmp_path / "other"), max_steps=1)
    shutil.copy(tmp_path / "other" / "model.safetensors", teacher / "model.safetensors")
    with pytest.raises(VramfitError, match="holds another student"):
        distilled(taught, tmp_path / "out", teacher=str(teacher), resume=True)
    with pytest.raises(VramfitError, match="another run: the teacher changed since"):
        distilled(taught, tmp_path / "out", teacher=str(teacher), resume=True, **student)


def test_a_folder_that_is_refused_gets_no_student(taught: Path, tmp_path: Path) -> None:
    shutil.copytree(taught / "teacher", tmp_path / "used")
    with pytest.raises(VramfitError, match=r"holds a (run|model) already"):
        distilled(taught, tmp_path / "used", max_steps=1)
    assert not (tmp_path / "used" / "student").exists()


def test_a_student_whose_run_never_began_is_made_anew(taught: Path, tmp_path: Path) -> None:
    with pytest.raises(VramfitError):
        distilled(taught, tmp_path / "out", device="emulated", memory="1MiB", max_steps=1)
    assert (tmp_path / "out" / "student" / "config.json").exists()
    record = distilled(taught, tmp_path / "out", keep_layers=1, max_steps=1)
    assert record.num_steps == 1
