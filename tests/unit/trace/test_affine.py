"""Sizes as functions of the batch: read off one trace, right at every batch."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.trace.work import PROBE_BATCH, at, evaluate, product, split

factors = st.integers(0, 10**6)
constants = st.integers(-(10**6), 10**6)
batches = st.integers(1, 2**31 - 1)
dimensions = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=5).map(tuple)


@given(factors, constants)
def test_a_number_seen_at_the_probe_tells_its_factor_and_its_constant(k: int, c: int) -> None:
    assert split(k * PROBE_BATCH + c, PROBE_BATCH) == (k, c)


@given(factors, constants, batches)
def test_what_is_split_can_be_read_back_at_any_batch(k: int, c: int, batch: int) -> None:
    assert at(split(k * PROBE_BATCH + c, PROBE_BATCH), batch) == k * batch + c


@given(st.integers(0, 2**62))
def test_a_trace_at_a_real_batch_has_constants_only(n: int) -> None:
    assert split(n, None) == (0, n)


@given(st.integers(0, 2**62))
def test_splitting_loses_nothing(n: int) -> None:
    assert at(split(n, PROBE_BATCH), PROBE_BATCH) == n


@given(dimensions, st.integers(1, 8), batches)
def test_a_product_of_dimensions_is_their_product_at_every_batch(
    sizes: tuple[tuple[int, int], ...], itemsize: int, batch: int
) -> None:
    expected = itemsize * prod(k * batch + c for k, c in sizes)
    assert evaluate(product(sizes, itemsize), batch) == expected


@given(dimensions)
def test_a_product_has_no_higher_power_than_dimensions_with_the_batch(sizes: tuple[tuple[int, int], ...]) -> None:
    assert len(product(sizes)) == 1 + sum(1 for k, _ in sizes if k)


def test_a_scalar_is_one_element() -> None:
    assert product(()) == (1,)
    assert evaluate(product((), 4), 77) == 4


@pytest.mark.parametrize("batch", [1, 2, 63, PROBE_BATCH])
def test_a_matrix_of_the_batch_with_itself_is_quadratic(batch: int) -> None:
    assert evaluate(product(((1, 0), (1, 0)), 4), batch) == 4 * batch**2
