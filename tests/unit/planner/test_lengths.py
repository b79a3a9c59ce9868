"""Real lengths: read, cut, summed up; split as the `Stepper` splits; timed; certified at the longest."""

from pathlib import Path
from random import Random
from statistics import mean

import pytest
import torch

from vramfit.errors import VramfitError
from vramfit.planner.job import Job
from vramfit.planner.plan import plan
from vramfit.planner.predictions import Choice
from vramfit.planner.recipes import Proposal, recipes
from vramfit.planner.request import Request, lengths_of
from vramfit.planner.varied import least_on_lengths, padded_batches, time_on_lengths
from vramfit.runtime.data.order import BatchOrder
from vramfit.step.splitting import Rows, packed_rows, padded_passes, split


def test_numbers_come_from_a_list_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\n512\n80\n")
    assert lengths_of(file).values == lengths_of([12, 512, 80]).values == (12, 512, 80)
    assert lengths_of(torch.tensor([12, 512, 80])).values == (12, 512, 80)  # as attention_mask.sum(1) gives them
    summary = lengths_of(file).cut(100).summary()
    assert (summary.longest, summary.median, summary.num_truncated, summary.num_samples) == (100, 80, 1, 3)
    assert summary.source == str(file)


@pytest.mark.parametrize("values", [[], [3, 0], ["x"], [1.5]])
def test_what_is_no_length_is_one_line(values: list[object]) -> None:
    with pytest.raises(VramfitError, match="lengths, a list"):
        lengths_of(values)


def test_passes_are_those_of_the_stepper() -> None:
    draw = Random(7)
    for _ in range(50):
        counts = [draw.randint(1, 64) for _ in range(draw.randint(1, 20))]
        limit = draw.randint(64, 300)
        width = max(counts)
        mask = (torch.arange(width)[None] < torch.tensor(counts)[:, None]).long()
        batch = {"input_ids": mask.clone(), "attention_mask": mask}
        made = [tuple(part["input_ids"].shape) for part in split(batch, limit)]
        assert padded_passes(counts, limit) == made


def test_packed_rows_are_those_of_the_stepper() -> None:
    draw = Random(11)
    for _ in range(50):
        counts = [draw.randint(1, 64) for _ in range(draw.randint(1, 20))]
        limit = draw.randint(64, 300)
        mask = (torch.arange(max(counts))[None] < torch.tensor(counts)[:, None]).long()
        made = split({"input_ids": mask.clone(), "attention_mask": mask}, limit, rows=Rows())
        assert sorted(packed_rows(counts, limit)) == sorted(int(part["attention_mask"].sum()) for part in made)


def test_a_plan_is_certified_at_the_longest_and_timed_on_all() -> None:
    short = [20] * 95 + [256] * 5
    made = plan("bert-small", batch=32, gpu="t4", lengths=short, precision="fp32")
    full = plan("bert-small", batch=32, seq=256, gpu="t4", precision="fp32")
    assert made.workload.seq == 256
    assert made.lengths is not None
    assert made.lengths.longest == 256
    assert made.step_time_s < full.step_time_s
    assert made.estimate.safe_reserved_bytes <= made.budget_bytes - made.margin_bytes


def test_padded_batches_are_timed_in_the_order_of_training() -> None:
    """In which samples of like length meet; rows without padding are as long in any order."""
    draw = Random(3)
    values = [max(2, min(128, int(draw.lognormvariate(3.2, 0.6)))) for _ in range(4000)]
    job = {"batch": 32, "gpu": "t4", "precision": "fp32"}
    drawn, grouped = (plan("bert-small", lengths=values, group_by_length=g, **job).step_time_s for g in (False, True))
    assert grouped < 0.7 * drawn
    asked = Job.of("bert-small", Request.of(job | {"group_by_length": True}), lengths_of(values))
    seen = [max(batch) for batch in padded_batches(asked)]
    epoch = [max(values[i] for i in batch) for batch in BatchOrder(values, 32, seed=1).epoch(0)]
    assert mean(seen) == pytest.approx(mean(epoch), rel=0.05)
    packed = [
        plan("bert-small", lengths=values, group_by_length=g, batch=32, gpu="h200", attention="packed").step_time_s
        for g in (False, True)
    ]
    assert packed[0] == packed[1]


def test_samples_beyond_the_model_are_cut_and_counted() -> None:
    made = plan("bert-tiny", batch=8, gpu="t4", lengths=[700, 40, 513, 512])
    assert made.workload.seq == 512
    assert made.lengths is not None
    assert made.lengths.num_truncated == 2


def test_passes_of_full_length_alone_take_no_longer_than_all() -> None:
    request = Request.of({"batch": 12, "seq": 64, "gpu": "t4"})
    draw = Random(1)
    varied = Job.of("bert-tiny", request, lengths_of([draw.choice([5, 20, 40, 64]) for _ in range(100)]))
    for recipe in recipes(varied, Proposal()):
        for micro_batch in (2, 6):
            choice = Choice(recipe, micro_batch, 0.0, 0)
            assert 0 < least_on_lengths(varied, choice) < time_on_lengths(varied, choice)
    full = Job.of("bert-tiny", request, lengths_of([64] * 10))
    assert least_on_lengths(full, choice) == time_on_lengths(full, choice)


def test_a_file_that_is_not_there_is_named_once() -> None:
    with pytest.raises(VramfitError) as caught:
        lengths_of("nosuch.txt")
    assert str(caught.value) == "cannot read nosuch.txt: No such file or directory"
