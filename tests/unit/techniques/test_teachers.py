"""A teacher in memory beside its student: the gradients of kept answers, and predictions that count it."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.small_models import make_model
from tests.unit.runtime.training.small_runs import write_model
from tests.unit.tasks.test_distilled import TASKS, answered, step_of, student_of

import vramfit
from vramfit.errors import WorkloadError
from vramfit.estimator import traced
from vramfit.tasks import find_task
from vramfit.tasks.parts.distilled import teach, teaching_of
from vramfit.tasks.parts.losses import TARGETS, model_inputs
from vramfit.tasks.parts.pooling import Contrast
from vramfit.techniques import packing
from vramfit.techniques.teachers import HeldTeacher, held_by, teacher_workload
from vramfit.workload import Workload

Batch = dict[str, torch.Tensor]
JOB: dict[str, Any] = {"batch": 8, "seq": 16, "gpu": "h200", "loop": "stepper"}


def teacher_of(task: str, **changes: Any) -> torch.nn.Module:
    torch.manual_seed(3)
    return make_model("bert", "sequence-classification" if task == "reranking" else task, **changes).eval()


def kept_from(teacher: torch.nn.Module, batch: Batch, task: str, *, hidden: bool) -> Batch:
    """A batch with what a teacher says of it, as the disk gives it."""
    with torch.no_grad():
        output = teacher(**model_inputs(batch), output_hidden_states=True)
    made = {name: output[name.removeprefix("teacher_")] for name in batch if name.endswith("logits")}
    if task == "question-answering":
        made = {name: value.masked_fill(batch["attention_mask"] == 0, -torch.inf) for name, value in made.items()}
    if hidden:
        made["teacher_hidden"] = torch.cat([state.half() for state in output.hidden_states[1:]], -1)
    return batch | made


def holding(student: torch.nn.Module, teacher: torch.nn.Module, task: str, *, hidden: bool) -> torch.nn.Module:
    made = copy.deepcopy(student)
    held = HeldTeacher(teacher, find_task(task), num_layers=2 if hidden else None)
    how = teaching_of(made)
    assert how is not None
    teach(made, replace(how, held=held))
    return made


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("task", TASKS[:4])
def test_a_held_teacher_gives_the_gradients_of_kept_answers(task: str, hidden: bool) -> None:
    own = {"num_labels": 1} if task == "reranking" else {}
    student, teacher = student_of(task, hidden=hidden, **own), teacher_of(task, **own)
    if task == "reranking":
        student._comparison = Contrast(loss="bce", num_texts=1)
    kept = kept_from(teacher, answered(task, student, hidden=hidden), task, hidden=hidden)
    whole, loss = step_of(student, kept, task, 12)
    asked = {name: value for name, value in kept.items() if name not in TARGETS}
    pair = holding(student, teacher, task, hidden=hidden)
    for micro_batch in (12, 5, 1):
        found, own_loss = step_of(pair, asked, task, micro_batch)
        assert float((found - whole).norm() / whole.norm()) <= 1e-5, micro_batch
        assert own_loss == pytest.approx(loss, rel=1e-5)
    if task == "reranking":
        return
    for model in (pair, teacher):
        packing.apply(model, task)
    packed, own_loss = step_of(pair, asked, task, 5)
    if task != "question-answering":  # whose padded labels choose among padding too
        assert float((packed - whole).norm() / whole.norm()) <= 1e-5
        assert own_loss == pytest.approx(loss, rel=1e-5)


def test_packed_places_have_the_gradients_of_kept_answers() -> None:
    task = "question-answering"
    student, teacher = student_of(task, alpha=1.0), teacher_of(task)
    batch = kept_from(teacher, answered(task, student), task, hidden=False)
    batch |= {name: batch[name].clamp(max=2) for name in ("start_positions", "end_positions")}
    packing.apply(student, task)
    kept, _ = step_of(student, batch, task, 5)
    packing.apply(teacher, task)
    asked = {name: value for name, value in batch.items() if name not in TARGETS}
    found, _ = step_of(holding(student, teacher, task, hidden=False), asked, task, 5)
    assert float((found - kept).norm() / kept.norm()) <= 1e-5


def test_a_teacher_is_no_part_of_its_student() -> None:
    student, teacher = student_of("sequence-classification"), teacher_of("sequence-classification")
    pair = holding(student, teacher, "sequence-classification", hidden=False)
    assert held_by(pair) is teacher
    assert held_by(student) is None
    assert set(pair.state_dict()) == set(student.state_dict())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


@pytest.mark.parametrize(("precision", "of_teacher"), [("fp32", "fp32"), ("amp-bf16", "bf16"), ("bf16", "bf16")])
def test_a_teacher_answers_in_the_type_that_autocast_casts_to(precision: str, of_teacher: str) -> None:
    w = Workload(model="bert-tiny", distill="logits", held_teacher="bert-mini", precision=precision, **JOB)
    found = teacher_workload(w)
    assert (found.model, found.mode, found.precision) == ("bert-mini", "infer", of_teacher)


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16"])
def test_the_weights_of_a_held_teacher_are_predicted(tmp_path: Path, precision: str) -> None:
    student = str(write_model(tmp_path / "student"))
    teacher = str(write_model(tmp_path / "teacher", num_hidden_layers=6, hidden_size=256, intermediate_size=512))
    without, beside = (
        vramfit.estimate(student, distill="logits", precision=precision, num_labels=2, **JOB, **more)
        for more in ({}, {"held_teacher": teacher})
    )
    weights = [e.timeline[0].breakdown["weights"] for e in (without, beside)]
    num = sum(p.numel() for p in vramfit.load(teacher, random_weights=True, device="cpu")[0].parameters())
    assert num <= (weights[1] - weights[0]) / (4 if precision == "fp32" else 2) <= 1.02 * num
    assert without.step_time_s is not None
    assert beside.step_time_s is not None
    assert beside.step_time_s > without.step_time_s


def test_few_traced_layers_say_what_all_layers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = (str(write_model(tmp_path / name, num_hidden_layers=12)) for name in ("s", "t"))
    job = JOB | {"distill": "logits", "held_teacher": teacher, "num_labels": 2}
    few = vramfit.estimate(student, **job)
    monkeypatch.setattr("vramfit.trace.run.unrolling_of", lambda *given: None)
    traced._kept.clear()
    every = vramfit.estimate(student, **job)
    assert [p.requested_bytes for p in few.timeline] == [p.requested_bytes for p in every.timeline]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"loop": "plain"}, "the plain loop does not ask it"),
        ({"offload": "optimizer"}, "offload optimizer is there to keep less in memory"),
        ({"num_gpus": 2, "parallel": "ddp"}, "each GPU would hold it"),
        ({"task": "embedding"}, "the loss compares all texts of a step"),
        ({"distill": None}, "held_teacher is for training with a teacher"),
        ({"held_teacher": "distilbert-base-uncased"}, "another family"),
    ],
)
def test_what_cannot_hold_a_teacher_says_why(changes: dict[str, Any], problem: str) -> None:
    job = JOB | {"distill": "logits", "held_teacher": "bert-mini"} | changes
    with pytest.raises(WorkloadError, match=problem):
        vramfit.estimate("bert-tiny", **job)


def test_a_teacher_of_another_family_is_refused_with_what_a_prediction_can_do() -> None:
    with pytest.raises(WorkloadError, match="another family") as error:
        vramfit.estimate("bert-tiny", **JOB, distill="logits", held_teacher="distilbert-base-uncased")
    hint = "take a teacher of the student's family; or leave out --held-teacher: its answers then come with the batch"
    assert (error.value.hint or "").startswith(hint)
    vramfit.estimate("bert-tiny", **JOB, distill="logits")
