"""What settings answer for the rooms that ask them."""

from typing import Any

import pytest

from vramfit.errors import WorkloadError
from vramfit.settings import SETTINGS, given_in, seen_in_trace
from vramfit.workload import Workload

JOB: dict[str, Any] = {"model": "bert-tiny", "batch": 8, "seq": 32}


def seen(*parts: str, **changes: Any) -> tuple[Any, ...]:
    return seen_in_trace(Workload(**(JOB | changes)), *parts)


@pytest.mark.parametrize(
    "changes",
    [{"batch": 4}, {"accumulate": 2}, {"precision": "tf32"}, {"allocator": "expandable"}, {"gpu": "t4"}],
)
def test_what_is_filled_in_afterwards_changes_no_trace(changes: dict[str, Any]) -> None:
    assert seen("layers", "step", **changes) == seen("layers", "step")


@pytest.mark.parametrize("changes", [{"optimizer": "sgd"}, {"checkpointing": "full"}, {"seq": 16}])
def test_what_is_of_the_step_changes_no_layer(changes: dict[str, Any]) -> None:
    assert seen("layers", **changes) == seen("layers")
    assert seen("layers", "step", **changes) != seen("layers", "step")


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"freeze": "embeddings"}, {"lora": 4}, {"dropout": False}])
def test_what_is_of_layers_changes_both(changes: dict[str, Any]) -> None:
    assert seen("layers", **changes) != seen("layers")


def test_two_layers_keep_one_frozen_and_no_list_of_names() -> None:
    freeze = SETTINGS["freeze"]
    assert freeze.in_few_layers(Workload(**JOB, freeze=6)) == 1
    assert freeze.in_few_layers(Workload(**JOB, freeze="encoder")) == "encoder"
    with pytest.raises(LookupError):
        freeze.in_few_layers(Workload(**JOB, freeze=("embeddings", "1")))
    with pytest.raises(LookupError):
        SETTINGS["checkpointing"].in_few_layers(Workload(**JOB, checkpointing=3))


def test_evaluation_keeps_layers_on_the_host_and_no_optimizer() -> None:
    offload, attention = SETTINGS["offload"], SETTINGS["attention"]
    assert [offload.inferred(v, packs=True) for v in ("weights", "optimizer", None)] == ["weights", None, None]
    assert [attention.inferred("packed", packs=packs) for packs in (True, False)] == ["packed", "sdpa"]


def test_only_settings_that_were_given_are_asked_for_contradictions() -> None:
    given = {s.keyword for s in given_in(Workload(**JOB, lora=4))}
    assert given == {"model", "seq", "accumulate", "micro_batch", "lora"}
    with pytest.raises(WorkloadError, match="lora is for mode train"):
        Workload(**JOB, lora=4, mode="infer")
