"""What an evaluation gives is what the Trainer's own way gives, and nothing is copied with every batch."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import trainer
from transformers.trainer_pt_utils import EvalLoopContainer

from vramfit.integrations.trainer import settings

WIDTHS = (5, 3, 9, 9, 1)


def _batches(kind: str) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(2 + i % 3, width, 4, generator=draw) for i, width in enumerate(WIDTHS)]
    return {
        "widths": made,
        "one width": [batch[:, :1] for batch in made],
        "losses": [batch[:, 0, 0] for batch in made],
        "bf16": [batch.bfloat16() for batch in made],
        "tuples": [(batch, batch[:, 0]) for batch in made],
        "mappings": [{"a": batch, "b": [batch.long()]} for batch in made],
    }[kind]


def _same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            _same(one[name], other[name])
    elif isinstance(one, list | tuple):
        for a, b in zip(one, other, strict=True):
            _same(a, b)
    else:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["widths", "one width", "losses", "bf16", "tuples", "mappings"])
@pytest.mark.parametrize("moved_every", [1, 2, 100])
@pytest.mark.parametrize("joins", [True, False])
def test_arrays_are_those_of_the_trainers_own_container(kind: str, moved_every: int, joins: bool) -> None:
    with settings.put_together_once():
        containers = [
            trainer.EvalLoopContainer(joins, padding_index=-100),
            EvalLoopContainer(joins, padding_index=-100),
        ]
    assert type(containers[0]) is not type(containers[1])
    for container in containers:
        for number, batch in enumerate(_batches(kind), 1):
            container.add(batch)
            if number % moved_every == 0:
                container.to_cpu_and_numpy()
    _same(containers[0].get_arrays(), containers[1].get_arrays())


def test_nothing_kept_gives_nothing() -> None:
    with settings.put_together_once():
        assert trainer.EvalLoopContainer(True).get_arrays() is None
    assert trainer.EvalLoopContainer is EvalLoopContainer


def test_wider_types_that_come_later_are_kept() -> None:
    parts = [np.ones((2, 3), np.float16), np.full((1, 5), 1e6, np.float32)]
    made = settings.put_together(parts, -100)
    assert made.dtype == np.float32
    assert made[2, 4] == 1e6
    assert made[0, 3] == -100


def test_a_part_of_a_tensor_does_not_keep_the_rest_of_it() -> None:
    whole = torch.zeros(4, 100)
    kept = settings.whole((whole[:, :1], whole))
    assert kept[0].untyped_storage().nbytes() == kept[0].nbytes
    assert kept[1] is whole
