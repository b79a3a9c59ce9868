from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from vramfit.errors import WorkloadError
from vramfit.records.codec import from_json, to_json
from vramfit.workload import CHOICES, Workload


def problems_of(**keywords: object) -> tuple[str, ...]:
    with pytest.raises(WorkloadError) as caught:
        Workload.from_keywords(model="bert-base-uncased", **keywords)
    return caught.value.problems


def test_all_problems_are_reported_at_once() -> None:
    problems = problems_of(batch=0, seq=-4, optimizer="adamw_fused", precision="fp61", memory="lots")
    assert len(problems) == 5
    assert any("batch 0" in p for p in problems)
    assert any("nearest: adamw-fused" in p for p in problems)
    assert any("'lots' is not a size" in p for p in problems)


def test_an_unknown_keyword_names_the_nearest() -> None:
    (problem,) = problems_of(batchsize=4)
    assert "batchsize" in problem
    assert "micro_batch" in problem or "batch" in problem


@pytest.mark.parametrize(
    ("given", "accumulate", "micro_batch"),
    [
        ({"batch": 32}, 1, 32),
        ({"batch": 32, "accumulate": 4}, 4, 8),
        ({"batch": 32, "micro_batch": 8}, 4, 8),
        ({"batch": 32, "micro_batch": 8, "accumulate": 4}, 4, 8),
        ({"batch": 10, "micro_batch": 4, "loop": "stepper"}, 3, 4),
        ({"batch": 10, "accumulate": 3, "loop": "stepper"}, 3, 4),
    ],
)
def test_accumulate_and_micro_batch_follow_from_each_other(
    given: dict[str, object], accumulate: int, micro_batch: int
) -> None:
    w = Workload.from_keywords(model="m", **given)
    assert (w.accumulate, w.micro_batch) == (accumulate, micro_batch)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch": 32, "accumulate": 5}, "does not divide"),
        ({"batch": 32, "accumulate": 4, "micro_batch": 4}, "is not batch 32"),
        ({"batch": 4, "micro_batch": 8}, "larger than batch 4"),
        ({"batch": 4, "accumulate": 8}, "more than the 4 samples"),
        ({"precision": "fp16"}, "GradScaler"),
        ({"lengths": (3, 4), "batch": 2}, "attention 'packed'"),
        ({"lengths": (3, 4), "batch": 3, "attention": "packed"}, "2 sequences but batch is 3"),
        ({"mode": "infer", "checkpointing": "full"}, "checkpointing"),
        ({"mode": "infer", "accumulate": 2, "batch": 4}, "accumulate is for mode train"),
        ({"quantize": "int8"}, "cannot learn"),
        ({"freeze": "nothing"}, "parameter names"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"batch": True}, "batch True"),
        ({"batch": 2**40}, "batch"),
        ({"checkpointing": "half"}, "checkpointing 'half'"),
        ({"model": ""}, "model"),
    ],
)
def test_contradictions_are_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        Workload.from_keywords(**({"model": "m"} | given))
    assert says in str(caught.value)


def test_inference_in_fp16_is_fine() -> None:
    assert Workload(model="m", mode="infer", precision="fp16").precision == "fp16"


def test_memory_is_taken_as_text_and_kept_as_bytes() -> None:
    assert Workload(model="m", memory="11.17GiB").memory == 11_993_696_174  # type: ignore[arg-type]


def test_a_workload_survives_json() -> None:
    w = Workload(model="m", batch=12, micro_batch=4, freeze=("a.*", "b.*"), gpu="h200", max_grad_norm=1.0)
    assert from_json(Workload, to_json(w)) == w


def test_another_batch_keeps_the_number_of_micro_batches() -> None:
    w = Workload(model="m", batch=8, accumulate=4).with_batch(16)
    assert (w.batch, w.accumulate, w.micro_batch) == (16, 4, 4)


def test_every_choice_is_accepted() -> None:
    for name, values in CHOICES.items():
        for value in values:
            extra: dict[str, Any] = {"mode": "infer"} if name in ("precision", "quantize", "attention") else {}
            if name == "offload":
                extra = {"loop": "stepper", "checkpointing": "full"}
            if value == "relations":
                extra = {"held_teacher": "m", "loop": "stepper"}
            if name in ("pooling", "loss"):
                extra = {"task": "embedding" if value not in ("listwise", "bce") else "reranking"}
            assert getattr(Workload.from_keywords(model="m", **({name: value} | extra)), name) == value


@pytest.mark.parametrize("freeze", ["embeddings, 3,a.*", ("embeddings", 3, "a.*"), ["embeddings", "3", "a.*"]])
def test_several_things_to_freeze_are_a_tuple_of_texts(freeze: Any) -> None:
    w = Workload(model="m", freeze=freeze)
    assert w.freeze == ("embeddings", "3", "a.*")
    assert from_json(Workload, to_json(w)) == w


@pytest.mark.parametrize(
    "freeze", ["embeddings,", "a.*,,b.*", ("embeddings", 0), ("embeddings", None), ("0", "a.*"), ()]
)
def test_a_list_to_freeze_with_something_wrong_in_it_is_refused(freeze: Any) -> None:
    with pytest.raises(WorkloadError, match="freeze"):
        Workload(model="m", freeze=freeze)


@pytest.mark.parametrize("freeze", ["embeddings,encoder", ("backbone", "x.*")])
def test_a_list_with_the_encoder_in_it_freezes_the_encoder(freeze: Any) -> None:
    assert Workload(model="m", freeze=freeze, quantize="int8").quantize == "int8"
    with pytest.raises(WorkloadError, match="takes out of training"):
        Workload(model="m", freeze=freeze, lora=8)
    with pytest.raises(WorkloadError, match="takes out of training"):
        Workload(model="m", freeze="embeddings,2", lora=8)
    with pytest.raises(WorkloadError, match="cannot learn"):
        Workload(model="m", freeze="embeddings,2", quantize="int8")


@pytest.mark.parametrize(
    ("keyword", "value", "says"),
    [
        ("quantize", "fp16", "fp16 is a precision: take --precision fp16"),
        ("quantize", "bf16", "bf16 is a precision: take --precision bf16"),
        ("precision", "int8", "int8 is a quantization: take --quantize int8"),
        ("precision", "int4", "int4 is a quantization: take --quantize int4"),
        ("quantize", "int7", "nearest: int"),
    ],
)
def test_a_value_of_another_keyword_is_sent_there(keyword: str, value: str, says: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        Workload.from_keywords(model="m", mode="infer", **{keyword: value})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"offload": "optimizer", "loop": "plain"}, "offload optimizer is for loop 'stepper'"),
        ({"offload": "optimizer", "optimizer": "adamw-8bit"}, "optimizer adamw-8bit do not go together"),
        ({"offload": "weights"}, "take checkpointing full"),
        ({"offload": "weights", "checkpointing": 3}, "take checkpointing full"),
        ({"offload": "weights", "checkpointing": "full", "dropout": False}, "offload weights needs dropout"),
        ({"offload": "weights", "checkpointing": "full", "lora": 8}, "offload weights and lora do not go together"),
        (
            {"offload": "weights", "checkpointing": "full", "quantize": "int8", "freeze": "encoder"},
            "offload weights and quantize int8 do not go together",
        ),
        ({"offload": "weights", "compile": True}, "offload weights and compile do not go together"),
        ({"offload": "optimizer", "mode": "infer"}, "offload optimizer is for mode train"),
        ({"offload": "activations"}, "offload activations is for the inputs of checkpointed layers"),
        ({"host_memory": "lots"}, "host_memory 'lots' is not a size"),
    ],
)
def test_what_does_not_go_with_offloading_is_refused_by_name(keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        Workload.from_keywords(model="m", **({"loop": "stepper"} | keywords))


def test_host_memory_is_read_as_people_write_it() -> None:
    assert Workload(model="m", host_memory="8GiB").host_memory == 8 * 2**30  # type: ignore[arg-type]


class Strange:
    """Neither a number nor a text, and compared with anything it gives no answer, as arrays do."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")


@pytest.mark.parametrize("name", [field.name for field in fields(Workload)])
@pytest.mark.parametrize("value", [Strange(), object(), b"x", 1.5j, [[]], {"a": 1}, np.arange(3)])
def test_a_value_of_the_wrong_kind_is_a_problem_and_never_an_accident(name: str, value: Any) -> None:
    with pytest.raises(WorkloadError) as caught:
        Workload.from_keywords(**{"model": "bert-tiny", name: value})
    assert any(problem.startswith(name) for problem in caught.value.problems)


@pytest.mark.parametrize(
    "name", ["task", "batch", "memory", "gpu", "freeze", "dropout", "torch_version", "max_grad_norm"]
)
def test_a_wrong_value_is_not_shown_at_any_length(name: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        Workload.from_keywords(**{"model": "bert-tiny", name: ["9" * 10_000]})
    assert len(str(caught.value)) < 500


def test_whole_numbers_of_other_packages_are_kept_as_pythons_own() -> None:
    given = Workload(
        model="bert-tiny",
        batch=np.int64(8),  # type: ignore[arg-type]
        seq=np.array(64),  # type: ignore[arg-type]
        lengths=[np.uint16(n) for n in range(1, 9)],  # type: ignore[arg-type]
        checkpointing=np.int8(1),  # type: ignore[arg-type]
        max_grad_norm=np.float32(0.5),  # type: ignore[arg-type]
        memory=np.int64(2**33),  # type: ignore[arg-type]
        dropout=np.bool_(False),  # type: ignore[arg-type]
        attention="packed",
        loop="stepper",
    )
    kinds = (given.batch, given.seq, given.checkpointing, given.max_grad_norm, given.memory, *(given.lengths or ()))
    assert [type(value) for value in kinds] == [int, int, int, float, int, *[int] * 8]
    assert given.dropout is False
    assert from_json(Workload, to_json(given)) == given


@pytest.mark.parametrize("value", [np.float64(8), np.bool_(True), True, np.array([8])])
def test_what_is_no_whole_number_does_not_count(value: Any) -> None:
    with pytest.raises(WorkloadError, match=r"batch .* is not a whole number"):
        Workload(model="bert-tiny", batch=value)
