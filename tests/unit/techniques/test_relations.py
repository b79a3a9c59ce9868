"""Attention relations: what is taken of a layer, what is learned from it, and which models have none to give."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.runtime.small_models import make_batch, make_model
from tests.unit.tasks.test_distilled import ALPHA, TEMPERATURE, step_of
from transformers import AutoModelForSequenceClassification, DistilBertConfig, MPNetConfig

import vramfit
from vramfit.errors import WorkloadError
from vramfit.settings import checkpointing
from vramfit.tasks import find_task
from vramfit.tasks.parts.distilled import Teaching, teach
from vramfit.tasks.parts.losses import RELATIONS, head_loss
from vramfit.techniques import packing
from vramfit.techniques.relations import give_relations
from vramfit.techniques.teachers import HeldTeacher, relation_heads

TASK = "sequence-classification"
JOB: dict[str, Any] = {"batch": 8, "seq": 16, "gpu": "h200", "loop": "stepper", "distill": "relations"}


def pair(task: str = TASK, *, alpha: float = ALPHA, num_heads: int = 4, own: int = 2, layer: int | None = None) -> Any:
    """A student with two heads of its own or more, whose teacher has four."""
    student, teacher = (make_model("bert", task, num_attention_heads=n) for n in (own, 4))
    teacher.eval()
    draw = torch.Generator().manual_seed(3)
    for model in (student, teacher):  # so far apart that there is something to learn
        for each in model.bert.encoder.layer:
            for weight in (one.weight for one in each.attention.self.children() if hasattr(one, "weight")):
                weight.data.copy_(torch.randn(weight.shape, generator=draw) * 0.3)
    give_relations(student)
    held = HeldTeacher(teacher, find_task(task), relations=True, relation_layer=layer)
    teach(student, Teaching(temperature=TEMPERATURE, alpha=alpha, relation_heads=num_heads, held=held))
    return student


def attention_of(model: Any, place: int) -> Any:
    return model.bert.encoder.layer[place].attention.self


def test_a_pass_gives_queries_keys_and_values_of_its_last_layer() -> None:
    model, batch = make_model("bert", TASK), make_batch(TASK)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    before = model(**inputs).logits
    give_relations(model)
    output = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(output.logits, before)
    last = attention_of(model, -1)
    for found, project in zip(output.relations, (last.query, last.key, last.value), strict=True):
        torch.testing.assert_close(found, project(output.hidden_states[-2]))
    with torch.no_grad():  # an evaluation keeps nothing
        assert not hasattr(model(**inputs), "relations")
    assert not any(name.startswith("_watched_call") for name in vars(last))


def test_relations_are_compared_as_in_minilm() -> None:
    student, batch = pair(alpha=1.0, num_heads=8), make_batch(TASK)
    _, loss = step_of(student, batch, TASK, 12)
    mask = batch["attention_mask"].bool()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    teacher = student._teaching.held.model
    output, given = student(**inputs), teacher(**inputs)
    total = 0.0
    for own, wanted in zip(output.relations, given.relations, strict=True):
        for row, real in enumerate(mask):
            logs = []
            for values in (own, wanted):
                heads = values[row, real].view(int(real.sum()), 8, -1).transpose(0, 1)
                logs.append(F.log_softmax(heads @ heads.transpose(1, 2) / heads.shape[-1] ** 0.5, -1))
            total += F.kl_div(logs[0], logs[1], reduction="sum", log_target=True).item() / 8
    logits = [x.logits / TEMPERATURE for x in (output, given)]
    soft = F.kl_div(F.log_softmax(logits[0], -1), F.softmax(logits[1], -1), reduction="batchmean") * TEMPERATURE**2
    assert total > 1
    assert loss == pytest.approx(total / int(mask.sum()) + soft.item(), rel=1e-4)


@pytest.mark.parametrize("task", [TASK, "token-classification"])
def test_every_split_padded_and_packed_has_the_gradient_of_the_whole_batch(task: str) -> None:
    student, batch = pair(task), make_batch(task)
    whole, loss = step_of(student, batch, task, 12)
    for micro_batch in (5, 1):
        split, own = step_of(student, batch, task, micro_batch)
        assert float((split - whole).norm() / whole.norm()) <= 1e-5
        assert own == pytest.approx(loss, rel=1e-5)
    for model in (student, student._teaching.held.model):
        packing.apply(model, task)
    packed, own = step_of(student, batch, task, 5)
    assert float((packed - whole).norm() / whole.norm()) <= 1e-5
    assert own == pytest.approx(loss, rel=1e-5)


def test_checkpointed_layers_have_the_same_gradient() -> None:
    student, batch = pair(), make_batch(TASK)
    whole, _ = step_of(student, batch, TASK, 12)
    twin = copy.deepcopy(student)
    checkpointing.apply(twin, "full")
    twice, _ = step_of(twin.train(), batch, TASK, 12)
    assert float((twice - whole).norm() / whole.norm()) <= 1e-5


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    student, batch = pair(own=4), make_batch(TASK)
    student.load_state_dict(student._teaching.held.model.state_dict())
    loss = head_loss(student, batch, TASK)
    assert loss.completes is not None
    part = loss.completes(batch)
    assert part[RELATIONS].shape == (*batch["input_ids"].shape, 96)
    sums = loss.sums(student(**loss.inputs(part)), part)
    assert sums[-1].item() == pytest.approx(0.0, abs=1e-3)


def test_another_layer_of_the_teacher_may_be_learned_from() -> None:
    batch = make_batch(TASK)
    first, last = (step_of(pair(layer=layer), batch, TASK, 12)[1] for layer in (1, 2))
    assert last == step_of(pair(), batch, TASK, 12)[1] != first
    with pytest.raises(WorkloadError, match="distill_relation_layer 3: BertForSequenceClassification has 2 layers"):
        pair(layer=3)


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    student, batch = pair(), make_batch(TASK)
    broken = student.bert.encoder.layer[-1].output.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        student(batch["input_ids"])
    assert "_watched_call" not in vars(attention_of(student, -1))
    broken.remove()
    assert len(student(batch["input_ids"]).relations) == 3


def test_attention_that_is_code_of_its_own_has_no_relations_to_give() -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    mpnet = AutoModelForSequenceClassification.from_config(MPNetConfig(**sizes, intermediate_size=48))
    with pytest.raises(WorkloadError, match="computes attention in code of its own"):
        give_relations(mpnet)
    distilbert = AutoModelForSequenceClassification.from_config(
        DistilBertConfig(vocab_size=40, dim=32, n_layers=2, n_heads=2, hidden_dim=48)
    )
    give_relations(distilbert)
    assert len(distilbert(torch.ones(1, 4, dtype=torch.long)).relations) == 3


def test_heads_of_relations_divide_both_widths() -> None:
    wide, narrow = (make_model("bert", TASK, hidden_size=n, num_attention_heads=4) for n in (64, 48))
    assert relation_heads(narrow, wide, None) == 4
    assert relation_heads(narrow, wide, 8) == 8
    with pytest.raises(WorkloadError, match=r"distill_relation_heads 5 does not divide .* \(48 and 64 numbers\)"):
        relation_heads(narrow, wide, 5)


def test_predictions_have_the_relations_in_them() -> None:
    job = JOB | {"held_teacher": "bert-mini", "batch": 128, "micro_batch": 64, "seq": 256}
    found = vramfit.estimate("bert-tiny", **job)
    logits = vramfit.estimate("bert-tiny", **job | {"distill": "logits"})
    assert found.peak_allocated_bytes > logits.peak_allocated_bytes + 64 * 2 * 256 * 256 * 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"held_teacher": None}, "needs the teacher in memory"),
        ({"compile": True}, "distill relations and compile do not go together"),
        ({"distill": "logits", "distill_relation_heads": 4}, "distill_relation_heads is for distill relations"),
        ({"distill_relation_layer": 9}, "distill_relation_layer 9: BertForSequenceClassification has 4 layers"),
    ],
)
def test_what_has_no_relations_says_why(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(WorkloadError, match=problem):
        vramfit.estimate("bert-tiny", **JOB | {"held_teacher": "bert-mini"} | changes)
