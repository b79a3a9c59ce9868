"""An effective batch shared out among ranks, and what the environment says of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.errors import WorkloadError
from vramfit.runtime.distributed.shards import share_out
from vramfit.runtime.distributed.world import World

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


@given(st.lists(st.integers(1, 512), min_size=1, max_size=80), st.integers(1, 9))
def test_every_sample_has_one_rank_and_no_rank_carries_the_long_ones(lengths: list[int], num_ranks: int) -> None:
    shares = share_out(lengths, num_ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    tokens = [sum(lengths[i] for i in share) for share in shares]
    assert max(tokens) <= sum(lengths) / num_ranks + max(lengths)


def test_equal_samples_are_dealt_evenly() -> None:
    assert sorted(len(share) for share in share_out([128] * 10, 4)) == [2, 2, 3, 3]


def test_torchruns_variables_are_read() -> None:
    world = World.of(TORCHRUN)
    assert world == World(rank=5, size=8, local_rank=1, local_size=4)
    assert world is not None
    assert world.num_nodes == 2
    assert World.of({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("name", "value", "says"), [("RANK", "8", "beyond"), ("WORLD_SIZE", "many", "many"), ("LOCAL_RANK", "-1", "-1")]
)
def test_variables_that_make_no_sense_are_refused(name: str, value: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        World.of({**TORCHRUN, name: value})
