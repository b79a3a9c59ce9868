"""A student's loss beside its teacher's answers: what it is, and that any split has the gradient of the whole batch."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.runtime.small_models import LENGTH, flat_gradient, flat_weights, make_batch, make_model

from vramfit.runtime.stepper import Stepper
from vramfit.settings.distillation import give_hidden
from vramfit.tasks.parts.distilled import Teaching, meta_targets, teach
from vramfit.tasks.parts.losses import head_loss
from vramfit.tasks.parts.pooling import Contrast, head_of
from vramfit.techniques import packing

Batch = dict[str, torch.Tensor]
TEMPERATURE, ALPHA = 3.0, 0.3
SPLITS = (12, 5, 3, 1)


def student_of(task: str, *, hidden: bool = False, alpha: float = ALPHA, **changes: Any) -> torch.nn.Module:
    """A small model that has a teacher."""
    model = make_model("bert", "sequence-classification" if task == "reranking" else task, **changes)
    teach(model, Teaching(temperature=TEMPERATURE, alpha=alpha, hidden_width=32 if hidden else None))
    if hidden:
        give_hidden(model)
    return model


def answered(task: str, model: torch.nn.Module, *, hidden: bool = False) -> Batch:
    """A batch with the answers of a teacher that draws them."""
    draw = torch.Generator().manual_seed(9)
    batch = make_batch("sequence-classification" if task == "reranking" else task)
    if task == "reranking":
        batch |= {"text_rows": torch.arange(12), "text_ids": torch.arange(12), "labels": torch.rand(12)}
    made = meta_targets(model, task, (12, LENGTH), "cpu")
    batch |= {name: torch.randn(value.shape, generator=draw).to(value.dtype) for name, value in made.items()}
    if task == "question-answering":
        for name in ("teacher_start_logits", "teacher_end_logits"):
            batch[name] = batch[name].masked_fill(batch["attention_mask"] == 0, -torch.inf)
    assert ("teacher_hidden" in batch) == hidden
    return batch


def step_of(model: torch.nn.Module, batch: Batch, task: str, micro_batch: int, **settings: Any) -> tuple[Any, float]:
    """What a plain step of length one subtracts, which is the gradient, and the loss."""
    twin = copy.deepcopy(model)
    before = flat_weights(twin)
    stepper = Stepper(twin, torch.optim.SGD(twin.parameters(), lr=1.0), micro_batch=micro_batch, **settings)
    stepper.task = task
    loss = stepper.step(batch)
    return before - flat_weights(twin), loss


TASKS = ("sequence-classification", "token-classification", "question-answering", "reranking", "embedding")


@pytest.mark.parametrize(
    ("task", "hidden"),
    [*((task, False) for task in TASKS), *((task, True) for task in TASKS[:4])],
)
def test_every_split_gives_the_gradient_of_the_whole_batch(task: str, hidden: bool) -> None:
    model = student_of(task, hidden=hidden, **({"num_labels": 1} if task == "reranking" else {}))
    settings = {}
    if task == "reranking":
        model._comparison = Contrast(loss="bce", num_texts=1)
    if task == "embedding":
        head_of(model).contrast = Contrast(loss="in-batch", num_texts=2)  # type: ignore[union-attr]
        settings = {"texts_per_sample": 2}
    batch = answered(task, model, hidden=hidden)
    whole, loss = step_of(model, batch, task, 12, **settings)
    assert float(whole.norm()) > 0
    for micro_batch in SPLITS[1:]:
        split, own = step_of(model, batch, task, micro_batch, **settings)
        assert float((split - whole).norm() / whole.norm()) <= 1e-5, micro_batch
        assert own == pytest.approx(loss, rel=1e-5)


def test_candidates_of_a_query_are_compared_whatever_the_split() -> None:
    model = student_of("reranking", num_labels=1)
    model._comparison = Contrast(loss="listwise", num_texts=3)
    batch = answered("reranking", model)
    whole, loss = step_of(model, batch, "reranking", 4, texts_per_sample=3)
    for micro_batch in (2, 1):
        split, own = step_of(model, batch, "reranking", micro_batch, texts_per_sample=3)
        assert float((split - whole).norm() / whole.norm()) <= 1e-5
        assert own == pytest.approx(loss, rel=1e-5)
    with torch.no_grad():
        scores = model(**{n: v for n, v in batch.items() if n in ("input_ids", "attention_mask")}).logits.reshape(4, 3)
    wanted = F.kl_div(
        F.log_softmax(scores / TEMPERATURE, 1),
        F.softmax(batch["teacher_logits"].reshape(4, 3) / TEMPERATURE, 1),
        reduction="batchmean",
    )
    hard = F.cross_entropy(scores, torch.zeros(4, dtype=torch.long))
    assert loss == pytest.approx(float(ALPHA * TEMPERATURE**2 * wanted + (1 - ALPHA) * hard), rel=1e-5)


def test_packed_sequences_have_the_same_gradient() -> None:
    for task in TASKS[:3]:
        model = student_of(task, hidden=True)
        batch = answered(task, model, hidden=True)
        if task == "question-answering":  # padded ones choose among padding too
            batch |= {"start_positions": batch["start_positions"].clamp(max=2)}
            batch |= {"end_positions": batch["end_positions"].clamp(max=2)}
            teach(model, Teaching(temperature=TEMPERATURE, alpha=1.0, hidden_width=32))
        padded, _ = step_of(model, batch, task, 12)
        packing.apply(model, task)
        packed, _ = step_of(model, batch, task, 5)
        assert float((packed - padded).norm() / padded.norm()) <= 1e-5, task


def test_classes_are_taken_as_hinton_has_them() -> None:
    model = student_of("sequence-classification")
    batch = answered("sequence-classification", model)
    _, loss = step_of(model, batch, "sequence-classification", 5)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    with torch.no_grad():
        output = model(**inputs)
    soft = F.kl_div(
        F.log_softmax(output.logits / TEMPERATURE, -1),
        F.softmax(batch["teacher_logits"] / TEMPERATURE, -1),
        reduction="batchmean",
    )
    assert loss == pytest.approx(float(ALPHA * TEMPERATURE**2 * soft + (1 - ALPHA) * output.loss), rel=1e-5)


def test_a_student_that_answers_as_its_teacher_has_nothing_to_learn_from_it() -> None:
    for task in TASKS[:4]:
        model = student_of(task, hidden=True, alpha=1.0, **({"num_labels": 1} if task == "reranking" else {}))
        if task == "reranking":
            model._comparison = Contrast(loss="bce", num_texts=1)
        batch = answered(task, model, hidden=True)
        with torch.no_grad():
            inputs = {n: v for n, v in batch.items() if n in ("input_ids", "attention_mask")}
            output = model(**inputs, output_hidden_states=True)
        for name in [name for name in batch if name.endswith("logits")]:
            batch[name] = output[name.removeprefix("teacher_")]
        batch["teacher_hidden"] = torch.cat(output.hidden_states[1:], -1)  # in fp32 here, not rounded
        loss = head_loss(model, batch, task)
        totals = [float(total) for total in loss.sums(output, batch)]
        assert totals == pytest.approx([0.0] * len(totals), abs=1e-4), task


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_labels_and_numbers_are_compared_one_by_one(problem: str) -> None:
    model = student_of("sequence-classification", alpha=1.0, problem_type=problem)
    batch = answered("sequence-classification", model) | {"labels": torch.rand(12, 3)}
    whole, loss = step_of(model, batch, "sequence-classification", 12)
    split, own = step_of(model, batch, "sequence-classification", 5)
    assert float((split - whole).norm() / whole.norm()) <= 1e-5
    assert own == pytest.approx(loss, rel=1e-5)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    given = batch["teacher_logits"]
    expected = F.mse_loss(logits, given)
    if problem != "regression":
        yes, wanted = (torch.stack([x, torch.zeros_like(x)], -1) / TEMPERATURE for x in (logits, given))
        both = F.kl_div(F.log_softmax(yes, -1), F.softmax(wanted, -1), reduction="none").sum(-1)
        expected = TEMPERATURE**2 * both.mean()
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_answers_that_are_as_many_as_tokens_stay_with_their_sample() -> None:
    value = torch.zeros(4, 16)
    assert not packing.is_per_token("teacher_logits", value, 16)
    assert packing.is_per_token("teacher_logits", torch.zeros(4, 16, 3), 16)
    assert packing.is_per_token("input_ids", value.long(), 16)


def test_no_gradient_reaches_a_model_without_a_teacher() -> None:
    model = make_model("bert", "sequence-classification")
    assert meta_targets(model, "sequence-classification", (2, 4), "meta") == {}
    model(**make_batch("sequence-classification")).loss.backward()
    assert flat_gradient(model).norm() > 0
