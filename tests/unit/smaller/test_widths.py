"""Students of a smaller hidden size: which there are, and that transformers loads them with weights of the teacher."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.smaller.test_distillation import distilled
from tests.unit.smaller.test_prune import answer, write_family
from tests.unit.smaller.tokenizers_made import write_corpus
from transformers import AutoConfig, AutoModelForSequenceClassification

from vramfit.errors import WorkloadError
from vramfit.runtime.training import events
from vramfit.smaller.neurons import find_feed_forwards
from vramfit.smaller.rows import Rows
from vramfit.smaller.source import Source
from vramfit.smaller.students import make_student
from vramfit.smaller.widths import check_width


def narrowed(folder: Path, output: Path, layers: tuple[int, ...] = (0, 1, 2, 3), size: int | None = 16) -> Any:
    """A student of the teacher in a folder, as transformers loads it."""
    trained = Source(model=str(folder)).open()
    rows = Rows(files=(str(write_corpus(folder.parent / "data.txt")),), task=trained.task)
    make_student(trained, output, layers, hidden_size=size, rows=rows)
    model, report = AutoModelForSequenceClassification.from_pretrained(output, output_loading_info=True)
    assert not any(report.values())
    return model.eval()


def load(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


@pytest.mark.parametrize(
    "family", ["bert", "roberta", "distilbert", "electra", "albert", "deberta-v2", "modernbert", "mpnet"]
)
def test_a_narrower_student_is_loaded_by_transformers(family: str, tmp_path: Path) -> None:
    narrow_embedding = {"embedding_size": 8} if family == "electra" else {}
    folder = write_family(tmp_path / "teacher", family, **narrow_embedding)
    student = narrowed(folder, tmp_path / "student")
    teacher = load(folder)
    assert (student.config.hidden_size, student.config.num_attention_heads) == (16, 1)
    assert {part.num_neurons for part in find_feed_forwards(student)[1]} == {24}
    assert torch.isfinite(answer(student, tmp_path / "student")).all()
    for name, own in student.named_parameters():  # every number is one of the teacher's
        assert torch.isin(own, teacher.get_parameter(name)).all(), name


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_layers_and_hidden_size_go_together(family: str, tmp_path: Path) -> None:
    student = narrowed(write_family(tmp_path / "teacher", family), tmp_path / "student", layers=(0, 3))
    assert (student.config.num_hidden_layers, student.config.hidden_size) == (2, 16)


def test_what_carries_the_answers_is_kept(tmp_path: Path) -> None:
    """A model whose other dimensions, heads and neurons do nothing loses nothing but the divisor of its norms."""
    folder = write_family(tmp_path / "teacher", "bert")
    model = load(folder)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight[::2] = module.bias[::2] = 0.0
        for layer in model.bert.encoder.layer:
            layer.attention.output.dense.weight[:, :16] = 0.0  # of the first head
            layer.output.dense.weight[:, ::2] = 0.0
    model.save_pretrained(folder)
    student = narrowed(folder, tmp_path / "student")
    for own, teachers in zip(student.bert.encoder.layer, model.bert.encoder.layer, strict=True):
        assert torch.equal(own.attention.self.query.weight, teachers.attention.self.query.weight[16:, 1::2])
        assert torch.equal(own.attention.output.dense.weight, teachers.attention.output.dense.weight[1::2, 16:])
        assert torch.equal(own.intermediate.dense.weight, teachers.intermediate.dense.weight[1::2, 1::2])
        assert torch.equal(own.output.LayerNorm.bias, teachers.output.LayerNorm.bias[1::2])
    assert torch.equal(student.classifier.weight, model.classifier.weight[:, 1::2])
    assert torch.equal(
        student.bert.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight[:, 1::2]
    )


def test_with_the_teachers_size_the_student_is_the_teacher(taught: Path, tmp_path: Path) -> None:
    size = AutoConfig.from_pretrained(taught / "teacher").hidden_size
    distilled(taught, tmp_path / "out", hidden_size=size, max_steps=1)
    teacher, student = load(taught / "teacher"), load(tmp_path / "out" / "student")
    assert student.config.num_hidden_layers == 4
    own = student.state_dict()
    assert all(torch.equal(own[name], value) for name, value in teacher.state_dict().items())


def test_a_narrower_student_learns_from_hidden_states_and_resumes(taught: Path, tmp_path: Path) -> None:
    said: list[str] = []
    settings: dict[str, Any] = {"hidden_size": 16, "keep_layers": 2, "distill": "hidden", "epochs": 4}
    record = distilled(
        taught,
        tmp_path / "out",
        eval_data=str(taught / "dev.csv"),
        on_event=lambda event: said.append(event.text) if isinstance(event, events.Note) else None,
        **settings,
    )
    assert record.best_value is not None
    assert record.best_value >= 0.9
    assert AutoConfig.from_pretrained(tmp_path / "out").hidden_size == 16
    assert any("Its hidden size is 16 of 32." in text for text in said)
    with pytest.raises(Exception, match="another hidden size"):
        distilled(taught, tmp_path / "out", keep_layers=2)


@pytest.mark.parametrize(("size", "nearest"), [(100, "64 or 128"), (20, "64"), (800, "768"), (0, "64 or 128")])
def test_sizes_that_are_not_whole_heads_are_refused_with_the_nearest_that_are(size: int, nearest: str) -> None:
    config = AutoConfig.for_model("bert")
    with pytest.raises(WorkloadError, match="the teacher has 12 heads of 64, 768 together") as refused:
        check_width(config, size)
    assert refused.value.hint is not None
    assert nearest in refused.value.hint
    check_width(config, 384)


@pytest.mark.parametrize("family", ["convbert", "deberta", "mobilebert"])
def test_a_family_that_is_not_understood_is_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "teacher", family)
    with pytest.raises(WorkloadError, match=f"{family} models cannot"):
        narrowed(folder, tmp_path / "student")
    assert not (tmp_path / "student" / "config.json").exists()


def test_two_heads_that_are_not_end_to_end_are_noticed(tmp_path: Path) -> None:
    """GPT-NeoX has the query, key and value of a head beside each other."""
    with pytest.raises(WorkloadError, match="heads in another order its answers change"):
        narrowed(write_family(tmp_path / "teacher", "gpt_neox"), tmp_path / "student")


def test_heads_that_are_not_as_wide_as_the_hidden_size_are_refused() -> None:
    config = AutoConfig.for_model("qwen3", hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    with pytest.raises(WorkloadError, match="heads of qwen3 models do not divide their hidden size"):
        check_width(config, 16)


def test_a_size_for_a_student_that_is_given_is_refused(taught: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="student and hidden_size both say what the student is"):
        distilled(taught, tmp_path / "out", student=str(taught / "teacher"), hidden_size=16)
