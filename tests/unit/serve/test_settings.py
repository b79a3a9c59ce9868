"""What a server is asked for: every problem at once, and shares of the memory."""

from typing import Any

import pytest

from vramfit.errors import WorkloadError
from vramfit.serve.engine import CLEAN_RUNS, Ceiling
from vramfit.serve.settings import ServeSettings


def test_workers_share_the_memory_of_their_device() -> None:
    three = ServeSettings(model="m", memory="3GiB", devices=("cuda:0", "cuda:1"), num_workers=3)
    assert [three.device_of(n) for n in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [three.share_bytes(n) for n in range(3)] == [3 * 2**29, 3 * 2**30, 3 * 2**29]
    assert ServeSettings(model="m").share_bytes(0) is None


def test_every_problem_is_said_at_once() -> None:
    wrong: dict[str, Any] = {"task": "pretraining", "precision": "fp8", "num_workers": 0, "memory": "much"}
    with pytest.raises(WorkloadError) as caught:
        ServeSettings(model="", pooling="max", devices=("tpu",), timeout_s=0, **wrong)
    assert len(caught.value.problems) == 8
    with pytest.raises(WorkloadError, match="needs memory"):
        ServeSettings(model="m", devices=("emulated",))


def test_the_ceiling_comes_back_after_a_while_without_trouble() -> None:
    ceiling = Ceiling(1000)
    ceiling.note(250)
    for _ in range(CLEAN_RUNS):
        ceiling.note(ceiling.num_tokens)
    assert ceiling.num_tokens == 500
    for _ in range(CLEAN_RUNS):
        ceiling.note(ceiling.num_tokens)
    assert ceiling.num_tokens == 1000
    for _ in range(CLEAN_RUNS):
        ceiling.note(ceiling.num_tokens)
    assert ceiling.num_tokens == 1000
