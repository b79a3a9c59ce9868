"""Floors: known without a trace, never above what a trace finds, and no trace is made of what they rule out."""

from collections.abc import Iterator

import pytest
import torch

from vramfit.estimator.traced import collection_paused
from vramfit.models.catalogue import all_entries
from vramfit.planner.bench import Bench
from vramfit.planner.request import Request
from vramfit.planner.search import Search
from vramfit.planner.space import Training, recipes, trainings

JOB = {"batch": 4, "seq": 32, "gpu": "h200"}
SMALLEST = {e.family: e.name for e in sorted(all_entries(), key=lambda e: -e.num_parameters)}


@pytest.fixture(autouse=True)
def _paused() -> Iterator[None]:
    with collection_paused():
        yield


def floors(bench: Bench, training: Training) -> list[tuple[int, int]]:
    """For each optimizer of a training: the floor, and what its step asks for in a trace."""
    made = {r.optimizer: r for r in recipes(bench.request, training, bench.base, (9, 0))}
    return [(bench.floor_bytes(r), bench.peek(r, 2).floor_bytes) for r in made.values()]


@pytest.mark.parametrize("family", sorted(SMALLEST))
def test_no_family_of_the_catalogue_takes_less_than_its_floor(family: str) -> None:
    bench = Bench(SMALLEST[family], Request.of(JOB))
    for floor, traced in floors(bench, next(trainings(bench.request, bench.num_layers))):
        assert 0 < floor <= traced


@pytest.mark.parametrize("task", ["token-classification", "masked-lm"])
def test_no_training_takes_less_than_its_floor(task: str) -> None:
    bench = Bench("bert-mini", Request.of({**JOB, "task": task}))
    for training in trainings(bench.request, bench.num_layers, all_allowed=True):
        assert all(floor <= traced for floor, traced in floors(bench, training)), training.words


def test_a_floor_is_close_where_nothing_else_is_held() -> None:
    bench = Bench("mpnet-base", Request.of(JOB))
    floor, traced = floors(bench, next(trainings(bench.request, bench.num_layers)))[0]
    assert traced - floor < 100 * 2**20  # cuBLAS's workspaces, and the head


def test_what_a_module_of_the_users_learns_is_not_known() -> None:
    from transformers import AutoModelForSequenceClassification, BertConfig

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            small = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
            self.used = AutoModelForSequenceClassification.from_config(small)

        def forward(self, **inputs: torch.Tensor) -> object:
            return self.used(**inputs)

    model = Own()
    bench = Bench(model, Request.of(JOB))
    recipe = recipes(bench.request, Training(), bench.base, (9, 0))[0]
    assert bench.floor_bytes(recipe) == sum(p.nbytes for p in model.parameters())


def test_what_cannot_fit_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("bert-base-uncased", Request.of({**JOB, "memory": "500MiB"}))
    made = recipes(bench.request, Training(), bench.base, (9, 0))
    monkeypatch.setattr(bench, "peek", lambda *_: pytest.fail("a trace was made"))
    assert Search(bench, made, bench.budget_bytes).run() is None
