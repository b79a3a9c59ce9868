"""Requests become blocks, blocks segments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.allocator.options import round_request, segment_bytes_for

MIB = 2**20


@pytest.mark.parametrize(("num_bytes", "block_bytes"), [(1, 512), (511, 512), (512, 512), (513, 1024)])
def test_requests_are_rounded_to_512_bytes(num_bytes: int, block_bytes: int) -> None:
    assert round_request(num_bytes) == block_bytes


@pytest.mark.parametrize(
    ("num_bytes", "block_bytes"),
    [
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (25 * MIB - 1, 26 * MIB),
    ],
)
def test_segments_come_in_three_kinds(num_bytes: int, block_bytes: int) -> None:
    assert segment_bytes_for(num_bytes) == block_bytes


@pytest.mark.parametrize(
    ("num_bytes", "block_bytes"),
    [(1200 * 1024, 1280 * 1024), (1280 * 1024, 1280 * 1024), (2 * MIB, 2 * MIB), (2000, 2048)],
)
def test_divisions_round_to_a_step_between_powers_of_two(num_bytes: int, block_bytes: int) -> None:
    assert round_request(num_bytes, (4,) * 16) == block_bytes


def test_divisions_differ_by_the_size_of_the_request() -> None:
    divisions = (0,) * 4 + (2,) * 12

    assert round_request(9 * MIB + 1, divisions) == 9 * MIB + 512
    assert round_request(17 * MIB, divisions) == 24 * MIB
    assert round_request(2**40 + 1, divisions) == 3 * 2**39


def test_few_bytes_are_not_rounded_to_divisions() -> None:
    assert round_request(3 * 512, (4,) * 16) == 3 * 512


@given(st.integers(1, 2**42), st.sampled_from([0, 1, 2, 4, 8, 64]))
def test_a_block_holds_its_request_and_is_whole_512_bytes(num_bytes: int, divisions: int) -> None:
    block_bytes = round_request(num_bytes, (divisions,) * 16)

    assert num_bytes <= block_bytes <= max(512, 2 * num_bytes)
    assert block_bytes % 512 == 0
    assert segment_bytes_for(block_bytes) >= block_bytes
