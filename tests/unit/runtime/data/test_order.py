"""The order of batches: every sample once, the same for the same seed, like lengths together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.runtime.data.order import BatchOrder

LENGTHS = st.lists(st.integers(1, 512), max_size=400)


@given(LENGTHS, st.integers(1, 64), st.integers(0, 2**32), st.integers(0, 50), st.booleans(), st.booleans())
def test_an_epoch_is_a_permutation_in_full_batches_but_the_last(
    lengths: list[int], batch: int, seed: int, epoch: int, shuffle: bool, bucket: bool
) -> None:
    order = BatchOrder(lengths, batch, seed=seed, shuffle=shuffle, bucket=bucket)
    batches = order.epoch(epoch)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    assert len(batches) == order.num_batches
    assert all(len(b) == batch for b in batches[:-1])
    again = BatchOrder(list(lengths), batch, seed=seed, shuffle=shuffle, bucket=bucket)
    assert again.epoch(epoch) == batches


@given(st.lists(st.integers(1, 512), min_size=64, max_size=400), st.integers(2, 16))
def test_padding_is_never_more_than_without_buckets_of_the_same_window(lengths: list[int], batch: int) -> None:
    def padded(batches: list[list[int]]) -> int:
        return sum(max(lengths[i] for i in b) * len(b) for b in batches)

    plain = BatchOrder(lengths, batch, seed=1, bucket=False).epoch(0)
    bucketed = BatchOrder(lengths, batch, seed=1).epoch(0)
    assert padded(bucketed) <= padded(plain)


def test_epochs_and_seeds_differ() -> None:
    lengths = list(range(1, 201))
    order = BatchOrder(lengths, 8, seed=3)
    assert order.epoch(0) != order.epoch(1)
    assert order.epoch(0) != BatchOrder(lengths, 8, seed=4).epoch(0)
    members = [{frozenset(b) for b in order.epoch(e)} for e in (0, 1)]
    large = BatchOrder(lengths * 20, 8, seed=3)
    assert members[0] == members[1]  # one window holds it all, so like lengths always meet
    assert {frozenset(b) for b in large.epoch(0)} != {frozenset(b) for b in large.epoch(1)}


def test_without_shuffling_the_longest_come_first() -> None:
    assert BatchOrder([1, 5, 3], 2, seed=0, shuffle=False).epoch(4) == [[1, 2], [0]]
    assert BatchOrder([1, 5, 3], 2, seed=0, shuffle=False, bucket=False).epoch(4) == [[0, 1], [2]]


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="batch of 0"):
        BatchOrder([1], 0, seed=0)
