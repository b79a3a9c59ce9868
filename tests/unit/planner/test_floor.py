"""Floors: known without a trace, never above what a trace finds, and no trace is made of what they rule out."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from vramfit.estimator.traced import collection_paused
from vramfit.models.catalogue import all_entries
from vramfit.planner import search
from vramfit.planner.choose import find
from vramfit.planner.job import Job
from vramfit.planner.predictions import (
    compares_too_much,
    floor_bytes,
    peek,
    safe_bytes,
    traced_passes,
    work_by_length,
)
from vramfit.planner.recipes import Proposal, Training, recipes, trainings
from vramfit.planner.request import Request

JOB = {"batch": 4, "seq": 32, "gpu": "h200"}
SMALLEST = {e.family: e.name for e in sorted(all_entries(), key=lambda e: -e.num_parameters)}


@pytest.fixture(autouse=True)
def _paused() -> Iterator[None]:
    with collection_paused():
        yield


def floors(job: Job, training: Training) -> list[tuple[int, int]]:
    """For each optimizer of a training: the floor, and what its step asks for in a trace."""
    made = {r.optimizer: r for r in recipes(job, Proposal(training=training))}
    return [(floor_bytes(job, r), peek(job, r, 2).floor_bytes) for r in made.values()]


@pytest.mark.parametrize("family", sorted(SMALLEST))
def test_no_family_of_the_catalogue_takes_less_than_its_floor(family: str) -> None:
    job = Job.of(SMALLEST[family], Request.of(JOB))
    for floor, traced in floors(job, Training()):
        assert 0 < floor <= traced


@pytest.mark.parametrize("task", ["token-classification", "masked-lm"])
def test_no_training_takes_less_than_its_floor(task: str) -> None:
    job = Job.of("bert-mini", Request.of({**JOB, "task": task}))
    for training in trainings(job, all_allowed=True):
        assert all(floor <= traced for floor, traced in floors(job, training)), training.words


def test_a_floor_is_close_where_nothing_else_is_held() -> None:
    floor, traced = floors(Job.of("mpnet-base", Request.of(JOB)), Training())[0]
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
    job = Job.of(model, Request.of(JOB))
    assert floor_bytes(job, recipes(job, Proposal())[0]) == sum(p.nbytes for p in model.parameters())


def test_what_cannot_fit_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.of("bert-base-uncased", Request.of({**JOB, "memory": "500MiB"}))
    monkeypatch.setattr(search, "peek", lambda *_: pytest.fail("a trace was made"))
    assert search.Search(job, recipes(job, Proposal()), job.budget_bytes).run() is None


def sizes_weighed(job: Job, limit_bytes: int) -> tuple[set[int], int]:
    """The micro-batches that a search weighed, and how many there are to try."""
    made = search.Search(job, recipes(job, Proposal())[:1], limit_bytes)
    made.run()
    return {size for name, _, size in (key for key in job.answers if key[0] == "_asked_bytes")}, len(made.sizes)


def test_what_fits_in_no_split_is_weighed_in_its_smallest_passes_only() -> None:
    job = Job.of("bert-tiny", Request.of({"batch": 8_192, "seq": 16, "gpu": "h200", "task": "embedding"}))
    smallest = peek(job, recipes(job, Proposal())[0], 1)
    limit_bytes = 2 * smallest.requested_bytes // 3
    assert smallest.floor_bytes < limit_bytes  # its vectors are too much, not its optimizer
    weighed, num_sizes = sizes_weighed(job, limit_bytes)
    assert weighed == {1}
    assert num_sizes > 100


def test_what_is_slower_than_what_fits_is_not_weighed() -> None:
    job = Job.of("bert-tiny", Request.of({"batch": 512, "seq": 16, "gpu": "h200", "task": "embedding"}))
    weighed, num_sizes = sizes_weighed(job, job.budget_bytes)
    assert len(weighed) <= 3 < num_sizes


def test_a_batch_whose_texts_cannot_be_compared_is_refused_without_a_look_at_any_setting() -> None:
    job = Job.of("bert-tiny", Request.of(JOB | {"task": "embedding", "batch": 10**8, "gpu": "t4"}))
    assert find(job) is None
    assert not [name for name, *_ in job.answers if name == "peek"]


def test_no_step_takes_less_than_what_its_comparison_holds() -> None:
    job = Job.of("bert-tiny", Request.of(JOB | {"task": "embedding", "batch": 4096}))
    for recipe in recipes(job, Proposal()):
        needed_bytes = safe_bytes(job, recipe, 64)
        assert not compares_too_much(job, needed_bytes, recipe)
        assert compares_too_much(job, needed_bytes // 4, recipe)  # most of it is the comparison


def test_passes_at_another_length_are_traced_once_for_all_optimizers() -> None:
    job = Job.of("bert-tiny", Request.of(JOB | {"batch": 64, "gpu": "t4"}))
    made = {r.optimizer: r for r in recipes(job, Proposal())}
    order = [("steady.micro0", 1), ("steady.micro1", 3), ("steady.optimizer", 1)]
    for recipe in made.values():
        own = traced_passes(job, recipe, 2)
        alone = own.work_by_length(16, 2, partial(own.trace, None, passes_at=16))
        assert work_by_length(job, recipe, 16).work_at(5, order) == alone.work_at(5, order)
    assert len(made) == 2
    assert len([name for name, *_ in job.answers if name == "_passes_at"]) == 1
