"""How a batch is split: among ranks, into passes, and the passes that a prediction counts with."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.step.splitting import fill, full_rows, padded_passes, share_out
from vramfit.trace.template import order_of
from vramfit.workload import Workload


@given(st.lists(st.integers(1, 512), min_size=1, max_size=80), st.integers(1, 9))
def test_every_sample_has_one_rank_and_no_rank_carries_the_long_ones(lengths: list[int], num_ranks: int) -> None:
    shares = share_out(lengths, num_ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    tokens = [sum(lengths[i] for i in share) for share in shares]
    assert max(tokens) <= sum(lengths) / num_ranks + max(lengths)


def test_equal_samples_are_dealt_evenly() -> None:
    assert sorted(len(share) for share in share_out([128] * 10, 4)) == [2, 2, 3, 3]


@pytest.mark.parametrize(("batch", "micro_batch"), [(12, 12), (12, 4), (10, 4), (11, 4), (13, 5), (7, 3)])
def test_a_prediction_counts_the_passes_that_a_split_makes(batch: int, micro_batch: int) -> None:
    """Of samples of full length; a trace serves from two samples on, so that a last one alone counts as two."""
    workload = Workload(model="m", batch=batch, micro_batch=micro_batch, seq=16, loop="stepper")
    turns = [turn for turn in order_of(workload, micro_batch=micro_batch) if turn[0].startswith("steady.micro")]
    sizes = [turn[2] if len(turn) > 2 else micro_batch for turn in turns]
    made = [max(num, 2) for num, _ in padded_passes([16] * batch, micro_batch * 16)]
    assert sizes == made


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(20, 300), st.integers(1, 30))
def test_rows_of_compared_texts_are_full_but_for_the_last(lengths: list[int], max_tokens: int, max_texts: int) -> None:
    rows = fill(lengths, max_tokens, max_texts)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= max_tokens for row in rows)
    assert all(len(row) <= max_texts for row in rows)


def test_full_rows_are_what_a_plan_counts_with() -> None:
    draw = random.Random(0)
    lengths = [round(draw.lognormvariate(3.4, 0.6)) + 4 for _ in range(2048)]
    for max_tokens, max_texts in ((25_000, 2_000), (8_000, 250), (25_000, 300)):
        rows, counted = fill(lengths, max_tokens, max_texts), full_rows(lengths, max_tokens, max_texts)
        tokens = [sum(lengths[i] for i in row) for row in rows]
        assert len(rows) == len(counted)
        assert tokens == pytest.approx(counted, rel=0.03, abs=120)
        if max_tokens / max_texts <= sum(lengths) / len(lengths):
            assert min(tokens[:-1]) > 0.998 * max_tokens


def test_very_many_texts_that_leave_holes_are_dealt_once() -> None:
    lengths = [70] * 30_000 + [20] * 10
    rows = fill(lengths, 100, 30)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert len(rows) == 30_000  # tokens alone would need 21,002
